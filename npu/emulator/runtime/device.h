// The emulated device: streams whose tasks run in order on the device's thread, and only on demand.
//
//   host threads ── submit ──► Stream.queue ──► device thread: runs the head of a stream
//                ── wait_for ─► Stream.wanted ─┘ that a caller waits for (see Order)
//
// Invariant: `submitted` and `finished` count the tasks of a stream, and queue.size() == submitted - finished.
// Device::lock guards all of this; task bodies run without it.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "acl/error_codes/rt_error_codes.h"
#include "emulator.h"

namespace emu {

struct Capture;
struct Group;
struct Stream;

// Point in a stream that others wait for. Reached once, when its task has run or was dropped with its stream.
struct Mark {
  Stream *stream = nullptr;     // the stream; null once the mark is reached
  uint64_t number = 0;          // of the task
  bool reached = false;
  int error = 0;                // of the stream when the mark was reached; waiting streams inherit it
  std::string text;
  int capture = 0;              // capture in which it was recorded; only copies of such a mark are reached
  std::chrono::steady_clock::time_point when;
};
using MarkPtr = std::shared_ptr<Mark>;

struct Task {
  const char *name;
  std::function<void()> body;             // work, run without the lock
  std::function<bool()> ready = nullptr;  // true if the body may run; empty means yes
  std::function<void()> pull = nullptr;   // if not ready: requests the tasks that it waits for
  MarkPtr awaits = nullptr;               // ready when this mark is reached
  MarkPtr reaches = nullptr;
  const void *writes = nullptr;           // address of a value that a stream may wait for
  uint64_t held = 0;                      // hangs until Device::released reaches this number
  bool shared = false;                    // other devices wait for it
};

// Thrown by a task's body: the error code of its stream. Other exceptions are errors of a kernel.
struct TaskError : std::runtime_error {
  TaskError(int code, const std::string &text) : std::runtime_error(text), code(code) {}
  int code;
};

struct Stream {
  explicit Stream(int id) : id(id) {}
  const int id;
  std::deque<Task> queue;
  uint64_t submitted = 0, finished = 0;
  uint64_t wanted = 0;             // number of the last task that a caller waits for
  bool running = false;            // the head is running
  int error = 0;                   // kept until the stream is destroyed
  std::string text;                // message of the error
  Capture *capture = nullptr;      // records tasks instead of running them
  Group *update = nullptr;         // tasks replace the tasks of this group
  size_t updated = 0;
  bool lane = false;               // belongs to the replay of a graph
};

enum class Order { lazy, eager, shuffled };

struct Device {
  std::mutex lock;
  std::condition_variable work, progress;
  std::vector<std::unique_ptr<Stream>> streams;   // [0] is the default stream
  Order order = Order::lazy;
  size_t depth = 4096;             // maximum tasks of a stream; submit waits beyond it
  size_t most_streams = 2048;      // of the device: created ones, and those of graphs
  size_t most_events = 65536;      // that were recorded and still exist
  size_t events = 0;
  std::mt19937_64 random;
  uint64_t released = 0;           // number of injected hangs that were released
  int next_id = 0;
  bool started = false;
  bool idle = true;                // the device's thread has no task that may run
};

Device &device();

using Lock = std::unique_lock<std::mutex>;

Stream *find(aclrtStream stream);  // null if there is none. This and the following functions need the lock.
Stream *find_id(int id);
Stream *make_stream();
void destroy_stream(Stream *stream);  // drops its remaining tasks; their marks are reached
int append(Lock &lock, Stream *stream, Task task);  // adds to the queue, never to a capture
int add(Lock &lock, Stream *stream, Task task);     // records in the stream's capture, if any; otherwise appends
void want(Stream *stream, uint64_t number);
// Waits until `number` tasks of the stream have run. Returns its error, or 507046 after `timeout` milliseconds (-1:
// never).
int wait_for(Lock &lock, Stream *stream, uint64_t number, int timeout);
int stream_error(Stream *stream);
void set_error(Stream *stream, int code, std::string text);  // keeps the first error

// For collectives, without the lock.
void wake();        // what tasks wait for outside of this process has changed
void run_shared();  // another device waits for this one: requests the tasks that are shared
int physical_device();  // number of this process's device, whatever ASCEND_RT_VISIBLE_DEVICES names
void settle();          // from now on the process has this device

// graph.cpp: operations and restrictions of captures. Each returns 0 or the documented error code.
int record(Lock &lock, Stream *stream, Task task);
int invalidate(Stream *stream, int code);                   // the end of its capture then fails; returns `code`
int join(Stream *stream, const Mark &mark);                 // the stream waits for the mark and may enter its capture
int no_sync(const Stream *stream, const char *name);        // 107027 while the stream captures
int no_sync(const char *name);                              // 107027 while any stream captures
int no_sync(const Mark &mark, const char *name);            // 107028 if the event was recorded in a capture
int capture_of(const Stream *stream);                       // 0: none
bool has_task_group(const Stream *stream);                 // its capture has one
size_t graph_streams();                                     // streams of the device that graphs take
bool has_stream();                                          // one more stream can be taken
bool unsafe_is_forbidden();                                 // for this thread: aclrtMemcpy and aclrtMemset

// log.cpp
// Lets the threads that the caller starts before its next call sleep up to 5 ms longer than asked. After it has made a
// stream, torch_npu starts a thread that sleeps 1 us at a time while it has no work: a tenth of a core.
void relax_timers();
void ran(const char *name, int stream);  // appends a task to the task log, if it is on
int injected(const char *name);     // error code of the fault injected into this call; 0 for none

}  // namespace emu

#define ENTER() \
  if (int code_ = emu::enter(__func__)) return code_
