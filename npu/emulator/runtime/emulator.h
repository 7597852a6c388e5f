// What the emulator's runtime (libascendcl) gives to its operators (libopapi).
//
// Device memory is host memory at addresses of its own, so a task may read it through at::from_blob. A task reads and
// writes device memory only when it runs, never when it is submitted: the values are not there before its turn.
#pragma once

#include <functional>

#include "acl/acl.h"

#define EMU_API __attribute__((visibility("default")))

namespace emu {

// Logs a host API call, as the first thing in each exported function; `name` must outlive the process (a literal,
// __func__). Returns 0, or the error code that was injected; a function that can fail returns it at once.
EMU_API int enter(const char* name);

// Appends `task` to the queue of `stream` (null: the default stream); it runs at its turn, on the device's thread. A
// capturing stream records it instead; in an update it replaces the next task of the task group.
// An exception in the task is an error of the stream (507015, the message for aclGetRecentErrMsg), told by its next
// synchronization, as a kernel's is; the stream runs nothing more. Returns 0, or an error code: return it.
EMU_API int submit(aclrtStream stream, const char* name, std::function<void()> task);

// Notes the text for aclGetRecentErrMsg of this thread and returns 161002, ACLNN_ERR_PARAM_INVALID.
EMU_API int refuse(const char* format, ...) __attribute__((format(printf, 1, 2)));

// The same with an error code of one's choice.
EMU_API int fail(int code, const char* format, ...) __attribute__((format(printf, 2, 3)));

// True if `name` is among the relaxations that activate(relax=...) was given, e.g. "fp32".
EMU_API bool option(const char* name);

}  // namespace emu
