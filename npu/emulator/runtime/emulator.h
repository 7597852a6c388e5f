// Interface of the emulator's runtime (libascendcl) for its operators (libopapi).
//
// Device memory is host memory in a separate range of addresses, so a task may read it through at::from_blob. A task
// accesses device memory only when it runs, never when it is submitted: earlier tasks have not written it before.
#pragma once

#include <functional>

#include "acl/acl.h"

#define EMU_API __attribute__((visibility("default")))

namespace emu {

// Logs a host API call; each exported function calls it first. `name` must outlive the process (a literal, __func__).
// Returns 0, or an injected error code, which a function that can fail must return at once.
EMU_API int enter(const char* name);

// Appends `task` to the queue of `stream` (null: the default stream). The task runs in order, on the device's thread. A
// capturing stream records it instead. In an update it replaces the next task of the task group.
// An exception in the task is an error of the stream (507015, with the message for aclGetRecentErrMsg). The next
// synchronization of the stream reports it, like a kernel's error. The stream runs no more tasks. Returns 0, or an
// error code to return.
EMU_API int submit(aclrtStream stream, const char* name, std::function<void()> task);

// Sets the text for aclGetRecentErrMsg of this thread and returns 161002, ACLNN_ERR_PARAM_INVALID.
EMU_API int refuse(const char* format, ...) __attribute__((format(printf, 1, 2)));

// The same with a given error code.
EMU_API int fail(int code, const char* format, ...) __attribute__((format(printf, 2, 3)));

// True if `name` is among the relaxations of activate(relax=...), e.g. "fp32".
EMU_API bool option(const char* name);

// True if `name` is among the defects of emulator.defects(...), with which operators compute wrong numbers.
EMU_API bool defect(const char* name);

// True in a task of a graph's replay.
EMU_API bool in_replay();

}  // namespace emu
