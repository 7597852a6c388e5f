// The device's thread, and how the host fills the streams' queues and waits for them. See device.h.
#include <pthread.h>

#include <algorithm>
#include <cstdio>
#include <thread>

#include "device.h"

namespace emu {

namespace {

// Never destroyed: the device's thread lives as long as the process.
Device &instance() {
  static Device &made = *new Device;
  return made;
}

void reach(const MarkPtr &mark, const Stream *stream) {
  mark->reached = true;
  mark->error = stream->error;
  mark->text = stream->text;
  mark->stream = nullptr;
  mark->when = std::chrono::steady_clock::now();
}

// Removes the head, as completed or (error != 0) as dropped.
void finish(Stream *stream) {
  Task done = std::move(stream->queue.front());
  stream->queue.pop_front();
  stream->finished++;
  if (done.reaches) reach(done.reaches, stream);
}

bool ready(Task &task) {
  if (task.awaits) return task.awaits->reached;
  return !task.ready || task.ready();
}

// Runs the head of the stream if it may run. Returns false if it waits for other tasks, which it then requests.
bool step(Lock &lock, Stream *stream) {
  Task &task = stream->queue.front();
  if (stream->error) {  // a stream stops at its first failure
    finish(stream);
    return true;
  }
  if (task.held > device().released) return false;
  if (!ready(task)) {
    if (task.awaits && task.awaits->stream) want(task.awaits->stream, task.awaits->number);
    if (task.pull) task.pull();
    return false;
  }
  if (task.awaits && task.awaits->error) set_error(stream, task.awaits->error, task.awaits->text);
  if (task.body && !stream->error) {
    ran(task.name, stream->id);
    auto body = task.body;  // the task may be destroyed while the lock is released
    stream->running = true;
    int error = injected("task");
    std::string text = "a fault was injected";
    lock.unlock();
    if (!error) try {
      body();
    } catch (const TaskError &failure) {
      error = failure.code;
      text = failure.what();
    } catch (const std::exception &failure) {
      error = ACL_ERROR_RT_AICORE_EXCEPTION;
      text = failure.what();
      text = text.substr(0, text.find('\n'));  // without ATen's backtrace
    }
    lock.lock();
    stream->running = false;
    if (error) {
      text = std::string(stream->queue.front().name) + ": " + text;
      fprintf(stderr, "emulated NPU: stream %d failed, %d: %s\n", stream->id, error, text.c_str());
      set_error(stream, error, text);
    }
  }
  finish(stream);
  return true;
}

// Runs one task of a requested stream. Returns false if all of them wait.
bool advance(Lock &lock) {
  Device &d = device();
  std::vector<Stream *> visited;
  size_t before;
  do {  // a request may request further tasks
    before = visited.size();
    for (auto &stream : d.streams) {
      Stream *s = stream.get();
      if (s->queue.empty() || s->finished >= s->wanted || std::count(visited.begin(), visited.end(), s)) continue;
      if (step(lock, s)) return true;
      visited.push_back(s);
      break;  // step may have added streams
    }
  } while (visited.size() > before);
  return false;
}

void run() {
  pthread_setname_np(pthread_self(), "emulated-npu");
  Device &d = device();
  Lock lock(d.lock);
  bool warned = false;
  for (;;) {
    if (advance(lock)) {
      d.progress.notify_all();
      warned = false;
      continue;
    }
    d.idle = true;
    d.progress.notify_all();
    bool is_requested =
        std::any_of(d.streams.begin(), d.streams.end(), [](auto &s) { return s->finished < s->wanted; });
    if (!is_requested || warned) {
      d.work.wait(lock);
    } else if (d.work.wait_for(lock, std::chrono::seconds(20)) == std::cv_status::timeout) {
      warned = true;
      for (auto &s : d.streams)
        if (s->finished < s->wanted && !s->queue.empty())
          fprintf(stderr, "emulated NPU: stream %d has waited 20 s at %s for a task that was not submitted\n", s->id,
                  s->queue.front().name);
    }
  }
}

// The shuffled order: some streams run ahead, requested or not.
void shuffle(Lock &lock) {
  Device &d = device();
  for (size_t n = d.random() % 3; n--;) {
    Stream *stream = d.streams[d.random() % d.streams.size()].get();
    uint64_t ahead = stream->submitted - stream->finished;
    if (!ahead || stream->lane) continue;
    want(stream, stream->finished + 1 + d.random() % ahead);
    d.progress.wait(lock, [&] { return d.idle; });
  }
}

}  // namespace

Device &device() { return instance(); }

Stream *find(aclrtStream handle) {
  Device &d = device();
  if (d.streams.empty()) make_stream();
  if (!handle) return d.streams[0].get();
  for (auto &stream : d.streams)
    if (stream.get() == handle && !stream->lane) return stream.get();
  return nullptr;
}

Stream *find_id(int id) {
  for (auto &stream : device().streams)
    if (stream->id == id) return stream.get();
  return nullptr;
}

Stream *make_stream() {
  Device &d = device();
  d.streams.push_back(std::make_unique<Stream>(d.next_id++));
  return d.streams.back().get();
}

void destroy_stream(Stream *stream) {
  Device &d = device();
  for (auto &task : stream->queue)
    if (task.reaches) reach(task.reaches, stream);
  auto at = std::find_if(d.streams.begin(), d.streams.end(), [&](auto &s) { return s.get() == stream; });
  d.streams.erase(at);
  d.work.notify_all();
}

void want(Stream *stream, uint64_t number) {
  if (number <= stream->wanted) return;
  stream->wanted = number;
  device().idle = false;
  device().work.notify_all();
}

void wake() {
  Lock lock(device().lock);
  device().work.notify_all();
}

void run_shared() {
  Lock lock(device().lock);
  for (auto &stream : device().streams) {
    uint64_t number = stream->finished, last = 0;
    for (auto &task : stream->queue) {
      number++;
      if (task.shared) last = number;
    }
    want(stream.get(), last);
  }
}

int append(Lock &lock, Stream *stream, Task task) {
  Device &d = device();
  if (!d.started) {
    d.started = true;
    std::thread(run).detach();
  }
  if (stream->queue.size() >= d.depth) {
    want(stream, stream->finished + 1);
    d.progress.wait(lock, [&] { return stream->queue.size() < d.depth; });
  }
  if (injected("hang")) task.held = d.released + 1;
  if (task.reaches) {
    task.reaches->stream = stream;
    task.reaches->number = stream->submitted + 1;
  }
  stream->queue.push_back(std::move(task));
  stream->submitted++;
  if (d.order == Order::eager) want(stream, stream->submitted);
  d.idle = false;
  d.work.notify_all();  // another stream may wait for this task
  if (d.order == Order::shuffled) shuffle(lock);
  return 0;
}

int add(Lock &lock, Stream *stream, Task task) {
  if (stream->capture || stream->update) return record(lock, stream, std::move(task));
  return append(lock, stream, std::move(task));
}

int stream_error(Stream *stream) {
  return stream->error ? fail(stream->error, "stream %d: %s", stream->id, stream->text.c_str()) : 0;
}

int wait_for(Lock &lock, Stream *stream, uint64_t number, int timeout) {
  Device &d = device();
  want(stream, number);
  auto there = [&] { return stream->finished >= number; };
  if (timeout < 0)
    d.progress.wait(lock, there);
  else if (!d.progress.wait_for(lock, std::chrono::milliseconds(timeout), there))
    return fail(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT, "stream %d is not at its end after %d ms", stream->id, timeout);
  return stream_error(stream);
}

void set_error(Stream *stream, int code, std::string text) {
  if (stream->error) return;
  stream->error = code;
  stream->text = std::move(text);
}

int submit(aclrtStream handle, const char *name, std::function<void()> body) {
  const int code = injected("launch");
  Lock lock(device().lock);
  Stream *stream = find(handle);
  if (code) return invalidate(stream, code);
  if (!stream) return fail(ACL_ERROR_RT_STREAM_CONTEXT, "%s: %p is no stream of the device", name, handle);
  return add(lock, stream, Task{name, std::move(body)});
}

}  // namespace emu
