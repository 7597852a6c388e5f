// Copies between host and device. A copy from or to pinned memory accesses it when it runs, not when it is submitted.
#include <cstring>

#include "acl/acl.h"
#include "device.h"
#include "memory.h"

using namespace emu;

namespace {

struct Copy {
  void *to;
  const void *from;
  size_t bytes;
  bool to_device, from_device;
};

// Refuses addresses that a device's memory controller would refuse: of the wrong kind, or not allocated.
int check(const char *name, void *to, size_t capacity, const void *from, size_t bytes, aclrtMemcpyKind kind,
          Copy *copy) {
  if (bytes > capacity) return fail(ACL_ERROR_RT_PARAM_INVALID, "%s: %zu bytes into %zu", name, bytes, capacity);
  bool to_device = touches_device(to), from_device = touches_device(from);
  bool fits = true;
  switch (kind) {
    case ACL_MEMCPY_HOST_TO_HOST: fits = !to_device && !from_device; break;
    case ACL_MEMCPY_HOST_TO_DEVICE:
    case ACL_MEMCPY_HOST_TO_BUF_TO_DEVICE: fits = to_device && !from_device; break;
    case ACL_MEMCPY_DEVICE_TO_HOST: fits = !to_device && from_device; break;
    case ACL_MEMCPY_DEFAULT: break;
    default: fits = to_device && from_device;
  }
  if (!fits)
    return fail(ACL_ERROR_RT_INVALID_MEMORY_TYPE, "%s: the addresses are not of the kind of copy, %d", name, kind);
  if ((to_device && !on_device(to, bytes)) || (from_device && !on_device(from, bytes)))
    return fail(ACL_ERROR_RT_PARAM_INVALID, "%s: %zu bytes that are not all allocated on the device", name, bytes);
  *copy = {to, from, bytes, to_device, from_device};
  return 0;
}

int copy_now(const char *name, const Copy &copy) {
  if (unsafe_is_forbidden())
    return fail(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT, "%s: not while a stream is capturing", name);
  memmove(copy.to, copy.from, copy.bytes);
  return 0;
}

int copy_later(const char *name, void *to, size_t capacity, const void *from, size_t bytes, aclrtMemcpyKind kind,
               aclrtStream handle) {
  if (int code = injected("memcpy")) return code;
  Copy copy;
  if (int code = check(name, to, capacity, from, bytes, kind, &copy)) return code;
  Lock lock(device().lock);
  Stream *stream = find(handle);
  if (!stream) return fail(ACL_ERROR_RT_STREAM_CONTEXT, "%s: no such stream", name);
  bool pageable = (!copy.to_device && !is_pinned(to, bytes)) || (!copy.from_device && !is_pinned(from, bytes));
  if (!pageable) return add(lock, stream, {name, [copy] { memmove(copy.to, copy.from, copy.bytes); }});
  // The runtime does the same: it synchronizes the stream, then copies at once.
  if (stream->capture)
    return fail(ACL_ERROR_RT_PARAM_INVALID, "%s: a copy of pageable memory cannot be captured", name);
  if (unsafe_is_forbidden())
    return fail(ACL_ERROR_RT_CAPTURE_MODE_BLOCK_ASYNC,
                "%s: a copy of pageable memory is synchronous, not while a stream is capturing", name);
  if (int code = wait_for(lock, stream, stream->submitted, -1)) return code;
  lock.unlock();
  return copy_now(name, copy);
}

int set(const char *name, void *address, size_t capacity, size_t bytes) {
  if (bytes > capacity || !on_device(address, bytes))
    return fail(ACL_ERROR_RT_PARAM_INVALID, "%s: %zu bytes that are not all allocated on the device", name, bytes);
  return 0;
}

}  // namespace

aclError aclrtMemcpy(void *to, size_t capacity, const void *from, size_t bytes, aclrtMemcpyKind kind) {
  ENTER();
  if (int code = injected("memcpy")) return code;
  Copy copy;
  if (int code = check(__func__, to, capacity, from, bytes, kind, &copy)) return code;
  return copy_now(__func__, copy);  // waits for no stream
}

aclError aclrtMemcpyAsync(void *to, size_t capacity, const void *from, size_t bytes, aclrtMemcpyKind kind,
                          aclrtStream stream) {
  ENTER();
  return copy_later(__func__, to, capacity, from, bytes, kind, stream);
}

aclError aclrtMemcpyAsyncWithCondition(void *to, size_t capacity, const void *from, size_t bytes, aclrtMemcpyKind kind,
                                       aclrtStream stream) {
  ENTER();
  return copy_later(__func__, to, capacity, from, bytes, kind, stream);
}

aclError aclrtMemset(void *address, size_t capacity, int32_t value, size_t bytes) {
  ENTER();
  if (int code = set(__func__, address, capacity, bytes)) return code;
  if (unsafe_is_forbidden())
    return fail(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT, "%s: not while a stream is capturing", __func__);
  memset(address, value, bytes);
  return 0;
}

aclError aclrtMemsetAsync(void *address, size_t capacity, int32_t value, size_t bytes, aclrtStream handle) {
  ENTER();
  if (int code = injected("launch")) return code;
  if (int code = set(__func__, address, capacity, bytes)) return code;
  Lock lock(device().lock);
  Stream *stream = find(handle);
  if (!stream) return fail(ACL_ERROR_RT_STREAM_CONTEXT, "%s: no such stream", __func__);
  return add(lock, stream, {__func__, [=] { memset(address, value, bytes); }});
}
