// Handles of the aclnn interface, its two phases, and the table of emulated operators.
#include "op.h"

#include <cstring>
#include <memory>

namespace ops {
namespace {

thread_local const char *current = "";  // operator whose first phase runs on this thread, for messages

// The registries are created on first use, since static constructors of other files fill them in any order.
std::vector<std::pair<const char *, const char *>> &operators() {
  static std::vector<std::pair<const char *, const char *>> all;
  return all;
}

std::vector<const Rule *> &rules() {
  static std::vector<const Rule *> all;
  return all;
}

std::string quoted(const std::string &text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + "\"";
}

}  // namespace

Rule::Rule(const char *operators, const char *id, const char *text, const char *source)
    : operators(operators), id(id), text(text), source(source) {
  rules().push_back(this);
}

Operator::Operator(const char *name, const char *file) {
  const char *slash = std::strrchr(file, '/');
  operators().emplace_back(name, slash ? slash + 1 : file);
}

void refuse(const Rule &rule, const std::string &given) {
  throw Refusal((*current ? std::string(current) + ": " : "") + rule.text + "; got " + given + " [" + rule.id + "; " +
                rule.source + "]");
}

std::string describe(at::IntArrayRef sizes) {
  std::string out = "(";
  for (size_t i = 0; i < sizes.size(); i++) out += (i ? ", " : "") + std::to_string(sizes[i]);
  return out + ")";
}

std::string describe(const aclTensor *tensor) {
  if (!tensor) return "nothing";
  return std::string(c10::toString(scalar_type(tensor->dtype))) + " " + describe(tensor->sizes);
}

at::ScalarType scalar_type(aclDataType dtype) {
  switch (dtype) {
    case ACL_FLOAT: return at::kFloat;
    case ACL_FLOAT16: return at::kHalf;
    case ACL_BF16: return at::kBFloat16;
    case ACL_DOUBLE: return at::kDouble;
    case ACL_INT8: return at::kChar;
    case ACL_UINT8: return at::kByte;
    case ACL_INT16: return at::kShort;
    case ACL_INT32: return at::kInt;
    case ACL_INT64: return at::kLong;
    case ACL_UINT64:
      return at::kLong;  // torch has no kernels for it; only the packed scales of TransQuantParam use it
    case ACL_BOOL: return at::kBool;
    default:
      throw Refusal(std::string(current) + ": tensors of aclDataType " + std::to_string(dtype) + " are not emulated");
  }
}

bool is_contiguous(const aclTensor *tensor) {
  int64_t step = 1;
  for (size_t d = tensor->sizes.size(); d-- > 0; step *= tensor->sizes[d])
    if (tensor->sizes[d] != 1 && tensor->strides[d] != step) return false;
  return true;
}

bool is_nz(const aclTensor *tensor) { return tensor && tensor->format == ACL_FORMAT_FRACTAL_NZ; }

at::Tensor view(const aclTensor *tensor, bool nz_too) {
  if (!tensor) return {};
  if (is_nz(tensor) && !nz_too)
    throw Refusal(std::string(current) +
                  ": a tensor in FRACTAL_NZ where the operator takes ND (npu_format_cast(x, 2) first)");
  const auto dtype = scalar_type(tensor->dtype);
  auto *data = static_cast<char *>(tensor->data) + tensor->offset * static_cast<int64_t>(c10::elementSize(dtype));
  return at::from_blob(data, tensor->sizes, tensor->strides, at::TensorOptions(dtype).device(at::kCPU));
}

std::vector<at::Tensor> views(const aclTensorList *list) {
  std::vector<at::Tensor> out;
  if (list)
    for (const auto *tensor : list->tensors) out.push_back(view(tensor));
  return out;
}

void write(const at::Tensor &out, const at::Tensor &result) {
  if (out.sizes() != result.sizes())
    throw std::runtime_error("the output has shape " + describe(out.sizes()) + ", the result " +
                             describe(result.sizes()));
  out.copy_(result);
}

int plan(const char *entry, uint64_t *workspace, aclOpExecutor **executor, const std::function<Work()> &prepare,
         uint64_t bytes, bool waits) {
  if (const int error = emu::enter(entry)) return error;
  const std::string name(entry, std::strlen(entry) - std::strlen("GetWorkspaceSize"));
  current = name.c_str();
  struct Leave {
    ~Leave() { current = ""; }
  } leave;
  try {
    Plainly plainly;
    *executor = new aclOpExecutor{prepare(), bytes, waits};
    *workspace = bytes;
    return 0;
  } catch (const Refusal &refusal) {
    return emu::refuse("%s", refusal.what());
  } catch (const std::exception &error) {
    return emu::refuse("%s: %s", name.c_str(), error.what());
  }
}

int launch(const char *name, uint64_t workspace, aclOpExecutor *executor, aclrtStream stream) {
  if (const int error = emu::enter(name)) return error;
  const std::unique_ptr<aclOpExecutor> owned(executor);
  if (!executor) return emu::refuse("%s: no executor (its first phase failed)", name);
  if (workspace < executor->workspace)
    return emu::refuse("%s: a workspace of %llu bytes, %llu are needed", name,
                       static_cast<unsigned long long>(workspace),
                       static_cast<unsigned long long>(executor->workspace));
  const int error = emu::submit(stream, name, [work = std::move(executor->work)] {
    Plainly plainly;
    work();
  });
  return error || !executor->waits ? error : aclrtSynchronizeStream(stream);
}

}  // namespace ops

extern "C" {

EMU_API aclTensor *aclCreateTensor(const int64_t *sizes, uint64_t dims, aclDataType dtype, const int64_t *strides,
                                   int64_t offset, aclFormat format, const int64_t *storage, uint64_t storage_dims,
                                   void *data) {
  return new aclTensor{
      {sizes, sizes + dims}, {strides, strides + dims}, {storage, storage + storage_dims}, offset, dtype, format, data};
}

EMU_API aclScalar *aclCreateScalar(void *value, aclDataType dtype) {
  switch (dtype) {
    case ACL_DOUBLE: return new aclScalar{*static_cast<double *>(value)};
    case ACL_FLOAT: return new aclScalar{*static_cast<float *>(value)};
    case ACL_INT64: return new aclScalar{*static_cast<int64_t *>(value)};
    case ACL_INT32: return new aclScalar{*static_cast<int32_t *>(value)};
    case ACL_BOOL: return new aclScalar{*static_cast<bool *>(value)};
    default: emu::refuse("aclCreateScalar: aclDataType %d is not emulated", dtype); return nullptr;
  }
}

EMU_API aclIntArray *aclCreateIntArray(const int64_t *values, uint64_t size) {
  return new aclIntArray{{values, values + size}};
}
EMU_API aclFloatArray *aclCreateFloatArray(const float *values, uint64_t size) {
  return new aclFloatArray{{values, values + size}};
}
EMU_API aclBoolArray *aclCreateBoolArray(const bool *values, uint64_t size) {
  return new aclBoolArray{std::vector<bool>(values, values + size)};
}
EMU_API aclTensorList *aclCreateTensorList(const aclTensor *const *tensors, uint64_t size) {
  return new aclTensorList{{tensors, tensors + size}};
}
EMU_API aclScalarList *aclCreateScalarList(const aclScalar *const *scalars, uint64_t size) {
  return new aclScalarList{{scalars, scalars + size}};
}

// Returns the current sizes in an array that the caller deletes.
EMU_API int aclGetViewShape(const aclTensor *tensor, int64_t **sizes, uint64_t *dims) {
  *dims = tensor->sizes.size();
  *sizes = new int64_t[*dims];
  std::copy(tensor->sizes.begin(), tensor->sizes.end(), *sizes);
  return 0;
}

EMU_API int aclDestroyTensor(const aclTensor *tensor) {
  delete tensor;
  return 0;
}
EMU_API int aclDestroyScalar(const aclScalar *scalar) {
  delete scalar;
  return 0;
}
EMU_API int aclDestroyIntArray(const aclIntArray *array) {
  delete array;
  return 0;
}
EMU_API int aclDestroyFloatArray(const aclFloatArray *array) {
  delete array;
  return 0;
}
EMU_API int aclDestroyBoolArray(const aclBoolArray *array) {
  delete array;
  return 0;
}

EMU_API int aclDestroyAclOpExecutor(aclOpExecutor *executor) {
  delete executor;
  return 0;
}

// A list owns its elements.
EMU_API int aclDestroyTensorList(const aclTensorList *list) {
  for (const auto *tensor : list->tensors) delete tensor;
  delete list;
  return 0;
}
EMU_API int aclDestroyScalarList(const aclScalarList *list) {
  for (const auto *scalar : list->scalars) delete scalar;
  delete list;
  return 0;
}

// Table as JSON: {"operators": {name: file}, "rules": [{"operators": [...], "id":, "text":, "source":}]}. Valid as long
// as the library is loaded.
EMU_API const char *emuOperators() {
  static const std::string table = [] {
    std::string out = "{\"operators\": {";
    for (const auto &[name, file] : ops::operators())
      out += (out.back() == '{' ? "" : ", ") + ops::quoted(name) + ": " + ops::quoted(file);
    out += "}, \"rules\": [";
    for (const auto *rule : ops::rules()) {
      std::string bound = "\"";
      for (const char *c = rule->operators; *c; c++) bound += *c == ' ' ? std::string("\", \"") : std::string(1, *c);
      out += (out.back() == '[' ? "" : ", ") + std::string("{\"operators\": [") + bound +
             "\"], \"id\": " + ops::quoted(rule->id) + ", \"text\": " + ops::quoted(rule->text) +
             ", \"source\": " + ops::quoted(rule->source) + "}";
    }
    return out + "]}";
  }();
  return table.c_str();
}

}  // extern "C"
