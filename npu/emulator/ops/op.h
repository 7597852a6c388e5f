// Interface for the operators of libopapi.
//
// Every aclnn operator has two phases. aclnnXGetWorkspaceSize checks its arguments and creates an executor. aclnnX
// submits the executor's work to the stream. OP(aclnnX, parameters...) defines both. Its body is the first phase: it
// checks the arguments and returns plan(...) with the work. The work accesses device memory only when it runs in the
// stream.
//
//     OP(aclnnExp, const aclTensor* self, const aclTensor* out) {
//       return plan(PHASE, [&] { return [x = view(self), y = view(out)] { write(y, at::exp(x)); }; });
//     }
//
// The parameters are in the order in which op-plugin passes them to EXEC_NPU_CMD, after the workspace that the plugin
// adds.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "../runtime/emulator.h"

// Contents of the opaque handles of the aclnn interface. Tensors describe device memory and do not own it.
struct aclTensor {
  std::vector<int64_t> sizes, strides, storage_sizes;
  int64_t offset;
  aclDataType dtype;
  aclFormat format;
  void *data;
};
struct aclScalar {
  at::Scalar value;
};
struct aclIntArray {
  std::vector<int64_t> values;
};
struct aclFloatArray {
  std::vector<float> values;
};
struct aclBoolArray {
  std::vector<bool> values;
};
struct aclTensorList {
  std::vector<const aclTensor *> tensors;
};
struct aclScalarList {
  std::vector<const aclScalar *> scalars;
};
struct aclOpExecutor {
  std::function<void()> work;
  uint64_t workspace;  // bytes of device memory that the second phase requires
  bool waits;          // the second phase returns after the work: the output's shape depends on the values
};

namespace ops {

using Work = std::function<void()>;
using Dtypes = std::initializer_list<at::ScalarType>;

// Documented constraint: the operators to which it applies (space-separated), its text, and its source document.
struct Rule {
  Rule(const char *operators, const char *id, const char *text, const char *source);
  const char *operators, *id, *text, *source;
};

// Emulated operator, for the table (emuOperators).
struct Operator {
  Operator(const char *name, const char *file);
};

// Call that the device would refuse; plan() converts it to the operator's error code and message.
struct Refusal : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Refuses the call with the rule's text, source and the given value; in an operator's work, it is an error of the
// stream.
[[noreturn]] void refuse(const Rule &rule, const std::string &given);
inline void require(const Rule &rule, bool holds, const std::string &given) {
  if (!holds) refuse(rule, given);
}

// Name of a tensor in error messages, such as "bfloat16 (4, 128)" or "nothing".
std::string describe(const aclTensor *tensor);
std::string describe(at::IntArrayRef sizes);

// The tensor's values in device memory, with its shape and strides; undefined for a null pointer. Refuses dtypes that
// the emulator does not support and, without `nz_too`, formats other than ND.
at::Tensor view(const aclTensor *tensor, bool nz_too = false);
std::vector<at::Tensor> views(const aclTensorList *list);
at::ScalarType scalar_type(aclDataType dtype);
bool is_nz(const aclTensor *tensor);
// True if the numbers lie one after the other; dimensions of size 1 may have any stride.
bool is_contiguous(const aclTensor *tensor);

inline bool is_one_of(at::ScalarType dtype, Dtypes allowed) {
  return std::find(allowed.begin(), allowed.end(), dtype) != allowed.end();
}

// Copies `result` to `out`, rounded to its dtype. Different shapes are an error of the stream.
void write(const at::Tensor &out, const at::Tensor &result);

// `x` in float32, the dtype in which every fused kernel computes.
inline at::Tensor f32(const at::Tensor &x) { return x.to(at::kFloat); }

// Disables autograd, dispatch to Python and autocast on the thread that runs the work.
struct Plainly {
  c10::InferenceMode inference;
  c10::impl::ExcludeDispatchKeyGuard excluded{c10::DispatchKeySet(
      {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::PythonDispatcher,
       c10::DispatchKey::AutocastCPU, c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
       c10::DispatchKey::FuncTorchDynamicLayerBackMode})};
};

// First phase of the operator `entry` (its __func__): runs `prepare`, which checks and returns the work, and returns
// the executor. `bytes`, `waits`: see aclOpExecutor.
int plan(const char *entry, uint64_t *workspace, aclOpExecutor **executor, const std::function<Work()> &prepare,
         uint64_t bytes = 0, bool waits = false);
int launch(const char *name, uint64_t workspace, aclOpExecutor *executor, aclrtStream stream);

}  // namespace ops

#define PHASE __func__, workspace, executor
#define OP(NAME, ...)                                                                                    \
  static const ops::Operator NAME##_is_emulated{#NAME, __FILE__};                                        \
  extern "C" EMU_API int NAME(void *, uint64_t workspace, aclOpExecutor *executor, aclrtStream stream) { \
    return ops::launch(__func__, workspace, executor, stream);                                           \
  }                                                                                                      \
  extern "C" EMU_API int NAME##GetWorkspaceSize(__VA_ARGS__, uint64_t *workspace, aclOpExecutor **executor)
