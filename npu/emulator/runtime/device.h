// The emulated device: streams whose tasks run in order on one thread of its own, and only when they are asked for.
//
//   host threads ── submit ──► Stream.queue ──► device thread: runs the head of a stream
//                ── wait_for ─► Stream.wanted ─┘ that somebody waits for (see Order)
//
// Invariant: `finished` counts the tasks that ran, `submitted` those that came, queue.size() == submitted - finished.
// All of this is guarded by Device::lock; task bodies run without it.
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
#include <string>
#include <vector>

#include "acl/error_codes/rt_error_codes.h"
#include "emulator.h"

namespace emu {

struct Capture;
struct Group;
struct Stream;

// A point in a stream that others wait for. Reached once, when its task ran or was thrown away with its stream.
struct Mark {
  Stream *stream = nullptr;     // that has to come this far; null once reached
  uint64_t number = 0;          // of the task there
  bool reached = false;
  int error = 0;                // of the stream when it was reached: those that waited for it inherit it
  std::string text;
  int capture = 0;              // recorded in this capture: such a mark is never reached itself, only its copies are
  std::chrono::steady_clock::time_point when;
};
using MarkPtr = std::shared_ptr<Mark>;

struct Task {
  const char *name;
  std::function<void()> body;             // what it does, without the lock
  std::function<bool()> ready = nullptr;  // may the body run now? Empty: yes
  std::function<void()> pull = nullptr;   // if not: asks others for what it waits for
  MarkPtr awaits = nullptr;               // ready when this is reached
  MarkPtr reaches = nullptr;
  const void *writes = nullptr;           // the address of a value that a stream may wait for
  uint64_t held = 0;                      // hangs until Device::released is this
};

struct Stream {
  explicit Stream(int id) : id(id) {}
  const int id;
  std::deque<Task> queue;
  uint64_t submitted = 0, finished = 0;
  uint64_t wanted = 0;             // tasks that somebody waits for: the device runs up to here
  bool running = false;            // the head is running
  int error = 0;                   // sticks until the stream is destroyed
  std::string text;                // what went wrong
  Capture *capture = nullptr;      // recording instead of running
  Group *update = nullptr;         // tasks replace those of this group
  size_t updated = 0;
  bool lane = false;               // of a graph's replay
};

enum class Order { lazy, eager, shuffled };

struct Device {
  std::mutex lock;
  std::condition_variable work, progress;
  std::vector<std::unique_ptr<Stream>> streams;   // [0] is the default stream
  Order order = Order::lazy;
  size_t depth = 4096;             // tasks that a stream holds before submit waits for it
  std::mt19937_64 random;
  uint64_t released = 0;           // of the hangs that were injected
  int next_id = 0;
  bool started = false;
  bool idle = true;                // the device's thread found nothing that it may run
};

Device &device();

using Lock = std::unique_lock<std::mutex>;

Stream *find(aclrtStream stream);  // null if there is none. Under the lock, as are all of these:
Stream *find_id(int id);
Stream *make_stream();
void destroy_stream(Stream *stream);  // what is left in it is thrown away, its marks are reached
int append(Lock &lock, Stream *stream, Task task);  // to the queue itself, never recorded
int add(Lock &lock, Stream *stream, Task task);     // recorded where the stream is capturing, else appended
void want(Stream *stream, uint64_t number);
// Waits until `number` tasks of the stream ran. Returns its error, or 507046 after `timeout` milliseconds (-1: never).
int wait_for(Lock &lock, Stream *stream, uint64_t number, int timeout);
int stream_error(Stream *stream);
void set_error(Stream *stream, int code, std::string text);  // the first one stays

// graph.cpp: what a capture takes, and what it forbids. Each returns 0 or the documented error code.
int record(Lock &lock, Stream *stream, Task task);
int join(Stream *stream, const Mark &mark);                 // the stream waits for the mark: it may enter its capture
int no_sync(const Stream *stream, const char *name);        // 107027 while the stream captures
int no_sync(const char *name);                              // 107027 while any stream captures
int no_sync(const Mark &mark, const char *name);            // 107028 if the event was recorded in a capture
int capture_of(const Stream *stream);                       // 0: none
bool unsafe_is_forbidden();                                 // to this thread: aclrtMemcpy and aclrtMemset

// log.cpp
int injected(const char *name);     // the fault that this call meets, 0 for none

}  // namespace emu

#define ENTER() \
  if (int code_ = emu::enter(__func__)) return code_
