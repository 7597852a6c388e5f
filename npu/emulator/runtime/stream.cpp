// Streams and events: the acl functions. queue.cpp holds their semantics.
#include <cstring>

#include "acl/acl.h"
#include "device.h"

using namespace emu;

namespace {

struct Event {
  MarkPtr mark;  // of the latest record; null before the first, which takes the device's event
};

int no_stream(const char *name, aclrtStream stream) {
  return fail(ACL_ERROR_RT_STREAM_CONTEXT, "%s: %p is no stream of the device", name, stream);
}

int synchronize(const char *name, aclrtStream handle, int timeout) {
  if (int code = injected("synchronize")) return code;
  Lock lock(device().lock);
  Stream *stream = find(handle);
  if (!stream) return no_stream(name, handle);
  if (int code = no_sync(stream, name)) return code;
  return wait_for(lock, stream, stream->submitted, timeout);
}

int create(aclrtStream *stream) {
  Lock lock(device().lock);
  find(nullptr);  // creates the default stream first
  if (!has_stream()) return fail(ACL_ERROR_RT_NO_STREAM_RESOURCE, "aclrtCreateStream: the device has no more streams");
  *stream = make_stream();
  relax_timers();
  return 0;
}

int destroy(const char *name, aclrtStream handle, bool at_once) {
  Lock lock(device().lock);
  Stream *stream = find(handle);
  if (!stream || !handle) return no_stream(name, handle);
  if (stream->capture) return fail(ACL_ERROR_RT_STREAM_CAPTURED, "%s: the stream is capturing", name);
  if (!at_once && !stream->error) wait_for(lock, stream, stream->submitted, -1);
  device().progress.wait(lock, [&] { return !stream->running; });
  destroy_stream(stream);
  return 0;
}

int synchronize_device(int timeout) {
  if (int code = injected("synchronize")) return code;
  Lock lock(device().lock);
  if (int code = no_sync("aclrtSynchronizeDevice")) return code;
  std::vector<std::pair<int, uint64_t>> all;
  for (auto &stream : device().streams)
    if (!stream->lane) all.emplace_back(stream->id, stream->submitted);
  int error = 0;
  for (auto [id, number] : all)
    if (Stream *stream = find_id(id))
      if (int code = wait_for(lock, stream, number, timeout)) error = code;
  return error;
}

}  // namespace

// The device's streams and events. A device waits for an event that is returned (aclrtCreateEvent); here it is an error.
extern "C" EMU_API void emu_limits(uint64_t streams, uint64_t events) {
  Lock lock(device().lock);
  device().most_streams = streams;
  device().most_events = events;
}

aclError aclrtCreateStream(aclrtStream *stream) {
  ENTER();
  return create(stream);
}

aclError aclrtCreateStreamWithConfig(aclrtStream *stream, uint32_t, uint32_t) {
  ENTER();
  return create(stream);
}

aclError aclrtDestroyStream(aclrtStream stream) {
  ENTER();
  return destroy(__func__, stream, false);
}

aclError aclrtDestroyStreamForce(aclrtStream stream) {
  ENTER();
  return destroy(__func__, stream, true);
}

aclError aclrtSynchronizeStream(aclrtStream stream) {
  ENTER();
  return synchronize(__func__, stream, -1);
}

aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t timeout) {
  ENTER();
  return synchronize(__func__, stream, timeout);
}

aclError aclrtSynchronizeDevice() {
  ENTER();
  return synchronize_device(-1);
}

aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout) {
  ENTER();
  return synchronize_device(timeout);
}

aclError aclrtStreamQuery(aclrtStream handle, aclrtStreamStatus *status) {
  ENTER();
  Lock lock(device().lock);
  Stream *stream = find(handle);
  if (!stream) return no_stream(__func__, handle);
  if (int code = no_sync(stream, __func__)) return code;
  *status = stream->queue.empty() ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  want(stream, stream->submitted);  // so that polling makes progress
  return stream_error(stream);
}

aclError aclrtStreamGetId(aclrtStream handle, int32_t *id) {
  ENTER();
  Lock lock(device().lock);
  Stream *stream = find(handle);
  if (!stream) return no_stream(__func__, handle);
  *id = stream->id;
  return 0;
}

// A stream stops at its first failure; the other mode would compute on wrong data.
aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t mode) {
  ENTER();
  relax_timers();  // torch_npu calls it between the two
  if (mode == ACL_STOP_ON_FAILURE) return 0;
  return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "ACL_CONTINUE_ON_FAILURE is not emulated");
}

aclError aclrtCreateEventWithFlag(aclrtEvent *event, uint32_t) {
  ENTER();
  *event = new Event;
  return 0;
}

aclError aclrtCreateEventExWithFlag(aclrtEvent *event, uint32_t flag) {
  ENTER();
  if (flag & ACL_EVENT_IPC) return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "events between processes are not emulated");
  *event = new Event;
  return 0;
}

aclError aclrtDestroyEvent(aclrtEvent event) {
  ENTER();
  Lock lock(device().lock);
  if (static_cast<Event *>(event)->mark) device().events--;
  delete static_cast<Event *>(event);
  return 0;
}

aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream_handle) {
  ENTER();
  if (int code = injected("launch")) return code;
  Lock lock(device().lock);
  Stream *stream = find(stream_handle);
  if (!stream) return no_stream(__func__, stream_handle);
  if (auto &recorded = static_cast<Event *>(handle)->mark; !recorded) {
    if (device().events == device().most_events)
      return fail(ACL_ERROR_RT_NO_EVENT_RESOURCE, "%s: the device has no more events", __func__);
    device().events++;
  }
  MarkPtr mark = std::make_shared<Mark>();
  mark->capture = capture_of(stream);
  Task task{__func__, nullptr};
  task.reaches = mark;
  static_cast<Event *>(handle)->mark = mark;
  return add(lock, stream, std::move(task));
}

// No wait before the first record. Otherwise waits for the latest record at the time of this call.
aclError aclrtStreamWaitEvent(aclrtStream stream_handle, aclrtEvent handle) {
  ENTER();
  if (int code = injected("launch")) return code;
  Lock lock(device().lock);
  Stream *stream = find(stream_handle);
  if (!stream) return no_stream(__func__, stream_handle);
  MarkPtr mark = static_cast<Event *>(handle)->mark;
  if (!mark && !stream->capture) return 0;
  if (int code = join(stream, mark ? *mark : Mark())) return invalidate(stream, code);
  Task task{__func__, nullptr};
  task.awaits = std::move(mark);
  return add(lock, stream, std::move(task));
}

// Recording an event again needs no reset.
aclError aclrtResetEvent(aclrtEvent, aclrtStream) {
  ENTER();
  return 0;
}

aclError aclrtSynchronizeEvent(aclrtEvent handle) {
  ENTER();
  if (int code = injected("synchronize")) return code;
  Lock lock(device().lock);
  MarkPtr mark = static_cast<Event *>(handle)->mark;
  if (!mark) return 0;
  if (int code = no_sync(*mark, __func__)) return code;
  if (mark->stream) want(mark->stream, mark->number);
  device().progress.wait(lock, [&] { return mark->reached; });
  return mark->error ? fail(mark->error, "the stream of the event failed: %s", mark->text.c_str()) : 0;
}

aclError aclrtQueryEventStatus(aclrtEvent handle, aclrtEventRecordedStatus *status) {
  ENTER();
  Lock lock(device().lock);
  MarkPtr mark = static_cast<Event *>(handle)->mark;
  if (mark)
    if (int code = no_sync(*mark, __func__)) return code;
  *status = !mark || mark->reached ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  if (mark && mark->stream) want(mark->stream, mark->number);  // so that polling makes progress
  return 0;
}

aclError aclrtQueryEventWaitStatus(aclrtEvent, aclrtEventWaitStatus *status) {
  ENTER();
  *status = ACL_EVENT_WAIT_STATUS_COMPLETE;  // waits hold the mark, not the event: the event may be destroyed
  return 0;
}

aclError aclrtEventElapsedTime(float *milliseconds, aclrtEvent start, aclrtEvent end) {
  ENTER();
  Lock lock(device().lock);
  MarkPtr from = static_cast<Event *>(start)->mark, to = static_cast<Event *>(end)->mark;
  if (!from || !to || !from->reached || !to->reached)
    return fail(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID, "aclrtEventElapsedTime: both events must have been reached");
  *milliseconds = std::chrono::duration<float, std::milli>(to->when - from->when).count();
  return 0;
}

aclError aclrtEventGetTimestamp(aclrtEvent handle, uint64_t *microseconds) {
  ENTER();
  Lock lock(device().lock);
  MarkPtr mark = static_cast<Event *>(handle)->mark;
  if (!mark || !mark->reached)
    return fail(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID, "aclrtEventGetTimestamp: the event must have been reached");
  *microseconds = std::chrono::duration_cast<std::chrono::microseconds>(mark->when.time_since_epoch()).count();
  return 0;
}

// 8 bytes of device memory as a flag between streams (torch_npu's external events).
aclError aclrtValueWrite(void *address, uint64_t value, uint32_t, aclrtStream stream_handle) {
  ENTER();
  if (int code = injected("launch")) return code;
  Lock lock(device().lock);
  Stream *stream = find(stream_handle);
  if (!stream) return no_stream(__func__, stream_handle);
  auto flag = static_cast<uint64_t *>(address);
  Task task{__func__, [flag, value] { __atomic_store_n(flag, value, __ATOMIC_RELEASE); }};
  task.writes = address;
  return add(lock, stream, std::move(task));
}

aclError aclrtValueWait(void *address, uint64_t value, uint32_t flag, aclrtStream stream_handle) {
  ENTER();
  if (int code = injected("launch")) return code;
  Lock lock(device().lock);
  Stream *stream = find(stream_handle);
  if (!stream) return no_stream(__func__, stream_handle);
  Task task{__func__, nullptr};
  task.ready = [=] {
    uint64_t now = __atomic_load_n(static_cast<uint64_t *>(address), __ATOMIC_ACQUIRE);
    switch (flag) {
      case ACL_STREAM_WAIT_VALUE_GEQ: return static_cast<int64_t>(now - value) >= 0;
      case ACL_STREAM_WAIT_VALUE_EQ: return now == value;
      case ACL_STREAM_WAIT_VALUE_AND: return (now & value) != 0;
      default: return ~(now | value) != 0;
    }
  };
  task.pull = [address] {
    for (auto &other : device().streams) {
      uint64_t number = other->finished;
      for (auto &queued : other->queue) {
        number++;
        if (queued.writes == address) {
          want(other.get(), number);
          break;
        }
      }
    }
  };
  return add(lock, stream, std::move(task));
}

aclError aclrtLaunchHostFunc(aclrtStream stream_handle, aclrtHostFunc function, void *argument) {
  ENTER();
  return submit(stream_handle, __func__, [=] { function(argument); });
}
