// Call log, error messages, injected faults, and the emulator's options. Python calls the emu_ functions at the end by
// ctypes.
#include <fnmatch.h>
#include <pthread.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "device.h"

namespace emu {

namespace {

struct Call {
  const char *name;
  int64_t thread;
};

struct Fault {
  std::string pattern;
  int64_t after;   // calls that still succeed
  int64_t times;   // calls that then fail; -1: all
  int code;
};

std::mutex lock;
std::vector<Call> calls;       // a ring buffer once it is full
uint64_t counted = 0;          // calls since the last clear
constexpr size_t kept = 1 << 18;
std::vector<std::pair<std::string, int>> tasks;  // name and stream; copied, since operators may be unloaded
std::atomic<bool> logs_tasks{false};
std::vector<Fault> faults;
std::atomic<bool> armed{false};
std::set<std::string> relaxed, defects, names;
std::atomic<bool> defective{false};
thread_local std::string recent;
thread_local bool lazy_timers = false;
constexpr unsigned long timer_slack = 5'000'000;  // ns

// Not kept per thread, since it changes in a forked process.
int64_t thread_id() { return syscall(SYS_gettid); }

void log(const char *name) {
  if (lazy_timers) {
    lazy_timers = false;
    prctl(PR_SET_TIMERSLACK, 0);
  }
  std::lock_guard<std::mutex> guard(lock);
  if (calls.size() < kept)
    calls.push_back({name, thread_id()});
  else
    calls[counted % kept] = {name, thread_id()};
  counted++;
}

int note(int code, const char *format, va_list arguments) {
  char text[1024];
  vsnprintf(text, sizeof text, format, arguments);
  recent = std::string("emulated NPU: ") + text;
  return code;
}

}  // namespace

void ran(const char *name, int stream) {
  if (!logs_tasks) return;
  std::lock_guard<std::mutex> guard(lock);
  if (tasks.size() < kept) tasks.emplace_back(name, stream);
}

int injected(const char *name) {
  if (!armed) return 0;
  std::lock_guard<std::mutex> guard(lock);
  for (auto &fault : faults) {
    if (!fault.times || fnmatch(fault.pattern.c_str(), name, FNM_EXTMATCH)) continue;
    if (fault.after-- > 0) continue;
    if (fault.times > 0) fault.times--;
    return fail(fault.code, "%s: a fault was injected, error code %d", name, fault.code);
  }
  return 0;
}

void relax_timers() {
  lazy_timers = true;
  prctl(PR_SET_TIMERSLACK, timer_slack);
}

int enter(const char *name) {
  log(name);
  return injected(name);
}

int fail(int code, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  note(code, format, arguments);
  va_end(arguments);
  return code;
}

int refuse(const char *format, ...) {
  constexpr int ACLNN_ERR_PARAM_INVALID = 161002;
  va_list arguments;
  va_start(arguments, format);
  note(ACLNN_ERR_PARAM_INVALID, format, arguments);
  va_end(arguments);
  return ACLNN_ERR_PARAM_INVALID;
}

bool option(const char *name) {
  std::lock_guard<std::mutex> guard(lock);
  return relaxed.count(name);
}

bool defect(const char *name) {
  if (!defective) return false;
  std::lock_guard<std::mutex> guard(lock);
  return defects.count(name);
}

}  // namespace emu

using namespace emu;

// Error text of this thread since the last call, which clears it.
extern "C" EMU_API const char *aclGetRecentErrMsg() {
  thread_local std::string taken;
  taken = std::move(recent);
  recent.clear();
  return taken.empty() ? nullptr : taken.c_str();
}

extern "C" {

EMU_API void emu_mark(const char *text) {
  const char *name;
  {
    std::lock_guard<std::mutex> guard(lock);
    name = names.insert(text).first->c_str();
  }
  log(name);
}

// Returns the number of calls since the last clear. Writes `capacity` of them, from `from` on. They must still be kept.
EMU_API uint64_t emu_calls(uint64_t from, uint64_t capacity, const char **called, int64_t *threads) {
  std::lock_guard<std::mutex> guard(lock);
  for (uint64_t n = from; n < counted && n - from < capacity; n++) {
    called[n - from] = calls[n % kept].name;
    threads[n - from] = calls[n % kept].thread;
  }
  return counted;
}

EMU_API uint64_t emu_calls_kept() { return kept; }

EMU_API void emu_clear_calls() {
  std::lock_guard<std::mutex> guard(lock);
  calls.clear();
  counted = 0;
}

// Starts (on) or ends the log of the tasks that the device runs. A start clears it.
EMU_API void emu_log_tasks(int on) {
  std::lock_guard<std::mutex> guard(lock);
  if (on) tasks.clear();
  logs_tasks = on;
}

// Returns the number of logged tasks. Writes the first `capacity` of them, oldest first. The names are valid until the
// next start of the log.
EMU_API uint64_t emu_tasks(uint64_t capacity, const char **names_of, int64_t *streams) {
  std::lock_guard<std::mutex> guard(lock);
  for (uint64_t n = 0; n < tasks.size() && n < capacity; n++) {
    names_of[n] = tasks[n].first.c_str();
    streams[n] = tasks[n].second;
  }
  return tasks.size();
}

// Makes the nth call from now whose name matches the shell pattern, and the times - 1 after it, fail.
EMU_API void emu_inject(const char *pattern, int64_t nth, int64_t times, int code) {
  std::lock_guard<std::mutex> guard(lock);
  faults.push_back({pattern, nth - 1, times, code});
  armed = true;
}

// Releases hanging tasks and removes the faults.
EMU_API void emu_heal() {
  {
    std::lock_guard<std::mutex> guard(lock);
    faults.clear();
    armed = false;
  }
  Lock guard(device().lock);
  device().released++;
  device().work.notify_all();
}

EMU_API void emu_defect(const char *name) {
  std::lock_guard<std::mutex> guard(lock);
  defects.insert(name);
  defective = true;
}

EMU_API void emu_repair() {
  std::lock_guard<std::mutex> guard(lock);
  defects.clear();
  defective = false;
}

EMU_API void emu_relax(const char *name) {
  std::lock_guard<std::mutex> guard(lock);
  relaxed.insert(name);
}

EMU_API void emu_order(int order, uint64_t seed, uint64_t depth) {
  Lock guard(device().lock);
  device().order = static_cast<Order>(order);
  device().random.seed(seed);
  device().depth = depth;
}

// Number of submitted tasks of all streams that have not run.
EMU_API uint64_t emu_pending() {
  Lock guard(device().lock);
  uint64_t pending = 0;
  for (auto &stream : device().streams) pending += stream->queue.size();
  return pending;
}

}  // extern "C"
