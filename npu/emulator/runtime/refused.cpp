// Functions that torch_npu is linked to and that are not emulated: each returns an error when it is called.
#include "acl/acl.h"
#include "device.h"

#define REFUSED(name, parameters)                                                        \
  extern "C" EMU_API aclError name parameters {                                          \
    ENTER();                                                                             \
    return emu::fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "%s is not emulated", __func__);  \
  }

// Several devices, and memory shared between processes.
REFUSED(aclrtDeviceEnablePeerAccess, (int32_t, uint32_t))
REFUSED(aclrtMemExportToShareableHandle, (aclrtDrvMemHandle, aclrtMemHandleType, uint64_t, uint64_t *))
REFUSED(aclrtMemImportFromShareableHandle, (uint64_t, int32_t, aclrtDrvMemHandle *))
REFUSED(aclrtMemSetPidToShareableHandle, (uint64_t, int32_t *, size_t))

// Kernels as binaries.
REFUSED(aclrtBinaryLoadFromData, (const void *, size_t, const aclrtBinaryLoadOptions *, aclrtBinHandle *))
REFUSED(aclrtBinaryGetFunction, (const aclrtBinHandle, const char *, aclrtFuncHandle *))
REFUSED(aclrtGetFunctionAddr, (aclrtFuncHandle, void **, void **))
REFUSED(rtDevBinaryRegister, (const void *, void **))
REFUSED(rtFunctionRegister, (void *, const void *, const char *, const void *, uint32_t))
REFUSED(rtKernelLaunch, (const void *, uint32_t, void *, uint32_t, void *, void *))
REFUSED(rtGetC2cCtrlAddr, (uint64_t *, uint32_t *))

// The driver reports a version before the one whose clock a profiler may read.
extern "C" EMU_API int halGetAPIVersion(int32_t *version) {
  *version = 0;
  return 0;
}
REFUSED(halGetDeviceInfo, (uint32_t, int32_t, int32_t, int64_t *))

// Callbacks that a host thread must fetch; aclrtLaunchHostFunc is emulated instead.
REFUSED(aclrtProcessReport, (int32_t))

// Dumps of operators' inputs and outputs.
REFUSED(aclmdlInitDump, ())
REFUSED(aclmdlSetDump, (const char *))
REFUSED(aclmdlFinalizeDump, ())
