// Properties of the machine: 8 Atlas A2 (Ascend910B4, each of 32 GB of memory or the configured size) under the CANN of
// the environment variable EMULATED_CANN, by default 9.1.0. A process uses one NPU: the device that is set when the
// process first allocates memory.
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>

#include "acl/acl.h"
#include "device.h"

using namespace emu;

namespace {

constexpr const char *SOC = "Ascend910B4", *DRIVER = "26.0.RC1";
constexpr int CORES = 20, VECTOR_CORES = 40, DEVICES = 8;

std::atomic<bool> initialized{false};
std::atomic<bool> active{false};
std::atomic<int> chosen{0};          // the process's device
std::atomic<bool> settled{false};    // it uses that device
thread_local bool device_set = false;
std::atomic<int64_t> parameters[ACL_OPT_STRONG_CONSISTENCY + 1];
int context;  // its address is the context handle

const char *cann() {
  const char *named = getenv("EMULATED_CANN");
  return named ? named : "9.1.0";
}

// Numbers of the devices that ASCEND_RT_VISIBLE_DEVICES names, up to the first that does not exist; all without it.
std::vector<int> visible() {
  std::vector<int> devices;
  const char *named = getenv("ASCEND_RT_VISIBLE_DEVICES");
  if (!named) {
    for (int id = 0; id < DEVICES; id++) devices.push_back(id);
    return devices;
  }
  for (std::istringstream text(named); text;) {
    int id = -1;
    char comma;
    if (!(text >> id) || id < 0 || id >= DEVICES) break;
    devices.push_back(id);
    text >> comma;
  }
  return devices;
}

// Returns 0 if there is a device `id`.
int known_device(const char *name, int id) {
  int count = static_cast<int>(visible().size());
  if (id >= 0 && id < count) return 0;
  return fail(ACL_ERROR_RT_INVALID_DEVICEID, "%s: device %d, there are %d", name, id, count);
}

// Returns 0 if the process may use device `id`.
int own_device(const char *name, int id) {
  if (int code = known_device(name, id)) return code;
  if (!settled || id == chosen) return 0;
  return fail(ACL_ERROR_RT_INVALID_DEVICEID, "%s: device %d, and the process uses device %d: it has one in the emulator",
              name, id, chosen.load());
}

}  // namespace

namespace emu {

void settle() { settled = true; }

int physical_device() { return visible().at(chosen); }

}  // namespace emu

aclError aclInit(const char *) {
  ENTER();
  if (initialized.exchange(true)) return ACL_ERROR_REPEAT_INITIALIZE;
  return 0;
}

aclError aclFinalize() {
  ENTER();
  initialized = false;
  return 0;
}

const char *aclrtGetSocName() {
  enter(__func__);
  return SOC;
}

aclError aclsysGetCANNVersion(aclCANNPackageName package, aclCANNPackageVersion *version) {
  ENTER();
  memset(version, 0, sizeof *version);
  if (package == ACL_PKG_NAME_DRIVER) {
    strcpy(version->version, DRIVER);
    strcpy(version->majorVersion, "26");
    strcpy(version->minorVersion, "0");
  } else {
    snprintf(version->version, sizeof version->version, "%s", cann());
    strcpy(version->majorVersion, "9");
    strcpy(version->minorVersion, "1");
    strcpy(version->releaseVersion, "0");
  }
  return 0;
}

aclError aclsysGetVersionStr(char *package, char *version) {
  ENTER();
  strcpy(version, strcmp(package, "driver") ? cann() : DRIVER);
  return 0;
}

aclError aclGetCannAttributeList(const aclCannAttr **attributes, size_t *count) {
  ENTER();
  static const aclCannAttr all[] = {ACL_CANN_ATTR_INF_NAN, ACL_CANN_ATTR_BF16, ACL_CANN_ATTR_JIT_COMPILE};
  *attributes = all;
  *count = 3;
  return 0;
}

aclError aclGetCannAttribute(aclCannAttr attribute, int32_t *value) {
  ENTER();
  *value = attribute == ACL_CANN_ATTR_INF_NAN || attribute == ACL_CANN_ATTR_BF16;
  return 0;
}

aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo what, int64_t *value) {
  ENTER();
  switch (what) {
    case ACL_DEVICE_INFO_AI_CORE_NUM: *value = CORES; return 0;
    case ACL_DEVICE_INFO_VECTOR_CORE_NUM: *value = VECTOR_CORES; return 0;
    case ACL_DEVICE_INFO_L2_SIZE: *value = int64_t{192} << 20; return 0;
    default: return fail(ACL_ERROR_INVALID_PARAM, "%s: no such capability, %d", __func__, what);
  }
}

aclError aclrtGetDeviceInfo(uint32_t id, aclrtDevAttr what, int64_t *value) {
  ENTER();
  if (int code = known_device(__func__, static_cast<int>(id))) return code;
  switch (what) {
    case ACL_DEV_ATTR_AICORE_CORE_NUM: *value = CORES; return 0;
    case ACL_DEV_ATTR_VECTOR_CORE_NUM: *value = VECTOR_CORES; return 0;
    default: return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "%s: attribute %d is not emulated", __func__, what);
  }
}

aclError aclrtGetDeviceCount(uint32_t *count) {
  ENTER();
  *count = static_cast<uint32_t>(visible().size());
  return 0;
}

aclError aclrtSetDevice(int32_t id) {
  ENTER();
  if (int code = own_device(__func__, id)) return code;
  chosen = id;
  device_set = active = true;
  return 0;
}

aclError aclrtGetDevice(int32_t *id) {
  ENTER();
  if (!device_set) return ACL_ERROR_RT_CONTEXT_NULL;  // a query, so no error is logged
  *id = chosen;
  return 0;
}

aclError aclrtResetDevice(int32_t id) {
  ENTER();
  if (int code = own_device(__func__, id)) return code;
  device_set = active = false;
  return 0;
}

aclError aclrtGetPrimaryCtxState(int32_t id, uint32_t *flags, int32_t *is_active) {
  ENTER();
  if (int code = known_device(__func__, id)) return code;
  if (flags) *flags = 0;
  *is_active = active && id == chosen;
  return 0;
}

aclError aclrtGetCurrentContext(aclrtContext *current) {
  ENTER();
  if (!device_set) return ACL_ERROR_RT_CONTEXT_NULL;  // a query, so no error is logged
  *current = &context;
  return 0;
}

aclError aclrtSetCurrentContext(aclrtContext current) {
  ENTER();
  if (current != &context) return fail(ACL_ERROR_RT_PARAM_INVALID, "%s: no such context", __func__);
  device_set = active = true;
  return 0;
}

aclError aclrtGetLogicDevIdByUserDevId(const int32_t user, int32_t *const logical) {
  ENTER();
  if (int code = known_device(__func__, user)) return code;
  *logical = visible()[user];
  return 0;
}

aclError aclrtDeviceCanAccessPeer(int32_t *can, int32_t, int32_t) {
  ENTER();
  *can = 0;
  return 0;
}

aclError aclrtDeviceGetBareTgid(int32_t *id) {
  ENTER();
  *id = getpid();
  return 0;
}

// The following functions set how a device computes or the timeouts of waits; none changes numbers here.
aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode) {
  ENTER();
  return 0;
}

aclError aclrtSetOpWaitTimeout(uint32_t) {
  ENTER();
  return 0;
}

aclError aclrtSetOpExecuteTimeOut(uint32_t) {
  ENTER();
  return 0;
}

aclError aclrtSetOpExecuteTimeOutV2(uint64_t timeout, uint64_t *actual) {
  ENTER();
  *actual = timeout;
  return 0;
}

aclError aclrtSetStreamAttribute(aclrtStream, aclrtStreamAttr, aclrtStreamAttrValue *) {
  ENTER();
  return 0;
}

// Computation on the CPU is always deterministic.
aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) {
  ENTER();
  if (option < 0 || option > ACL_OPT_STRONG_CONSISTENCY)
    return fail(ACL_ERROR_RT_PARAM_INVALID, "%s: no option %d", __func__, option);
  parameters[option] = value;
  return 0;
}

aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t *value) {
  ENTER();
  if (option < 0 || option > ACL_OPT_STRONG_CONSISTENCY)
    return fail(ACL_ERROR_RT_PARAM_INVALID, "%s: no option %d", __func__, option);
  *value = parameters[option];
  return 0;
}

aclError aclrtCtxSetSysParamOpt(aclSysParamOpt, int64_t) {
  ENTER();
  return 0;
}

aclError aclrtPeekAtLastError(aclrtLastErrLevel) {
  enter(__func__);
  return 0;
}

aclError aclrtGetLastError(aclrtLastErrLevel) {
  enter(__func__);
  return 0;
}

// The plugin's own log: to stderr if EMULATED_NPU_LOG is set.
void aclAppLog(aclLogLevel level, const char *function, const char *, uint32_t line, const char *format, ...) {
  static const bool wanted = getenv("EMULATED_NPU_LOG") != nullptr;
  if (!wanted) return;
  va_list arguments;
  va_start(arguments, format);
  fprintf(stderr, "[%d] %s:%u ", level, function, line);
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  va_end(arguments);
}
