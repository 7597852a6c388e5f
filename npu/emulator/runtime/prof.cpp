// Profiling. torch_npu.profiler records the host's side itself. The device's side is not emulated: the refusal is also
// written once to stderr, since the plugin does not report it. The plugin's own reports (Msprof) are discarded.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <functional>
#include <string_view>

#include "acl/acl.h"
#include "acl/acl_prof.h"
#include "device.h"

using namespace emu;

namespace {

int no_profiler(const char *name) {
  static std::atomic<bool> warned{false};
  if (!warned.exchange(true)) fputs("emulated NPU: no profile of the device: its times would say nothing\n", stderr);
  return fail(ACL_ERROR_FEATURE_UNSUPPORTED, "%s: no profile of the device: its times would say nothing", name);
}

}  // namespace

aclError aclprofInit(const char *, size_t) {
  ENTER();
  return no_profiler(__func__);
}

aclError aclprofFinalize() {
  ENTER();
  return no_profiler(__func__);
}

aclError aclprofStart(const aclprofConfig *) {
  ENTER();
  return no_profiler(__func__);
}

aclError aclprofStop(const aclprofConfig *) {
  ENTER();
  return no_profiler(__func__);
}

aclprofConfig *aclprofCreateConfig(uint32_t *, uint32_t, aclprofAicoreMetrics, const aclprofAicoreEvents *, uint64_t) {
  if (!enter(__func__)) no_profiler(__func__);
  return nullptr;
}

aclError aclprofDestroyConfig(const aclprofConfig *) {
  ENTER();
  return no_profiler(__func__);
}

extern "C" {

EMU_API int32_t MsprofRegisterCallback(uint32_t, int32_t (*)(uint32_t, void *, uint32_t)) { return 0; }

EMU_API int32_t MsprofReportApi(uint32_t, const void *) { return 0; }

EMU_API int32_t MsprofReportCompactInfo(uint32_t, const void *, uint32_t) { return 0; }

EMU_API int32_t MsprofReportAdditionalInfo(uint32_t, const void *, uint32_t) { return 0; }

EMU_API uint64_t MsprofGetHashId(const char *text, size_t length) {
  return std::hash<std::string_view>{}({text, length});
}

EMU_API uint64_t MsprofSysCycleTime() {
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

}  // extern "C"
