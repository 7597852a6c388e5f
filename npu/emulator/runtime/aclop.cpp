// The aclop functions that torch_npu is linked to. Operators are registered by register_aclop.
#include "aclop.h"

#include "acl/acl_op_compiler.h"
#include "device.h"

using namespace emu;

namespace {

using Maker = std::function<std::function<void()>(const OldOp &)>;

std::map<std::string, Maker> &makers() {
  static auto &made = *new std::map<std::string, Maker>;
  return made;
}

template <class T>
std::vector<T> copied(const void *from, int count) {
  return {static_cast<const T *>(from), static_cast<const T *>(from) + count};
}

}  // namespace

void emu::register_aclop(const char *type, Maker make) { makers()[type] = std::move(make); }

aclTensorDesc *aclCreateTensorDesc(aclDataType type, int count, const int64_t *dims, aclFormat format) {
  if (enter(__func__)) return nullptr;
  return new aclTensorDesc{type, {dims, dims + count}, format, {}, false, format, {}};
}

void aclDestroyTensorDesc(const aclTensorDesc *desc) {
  enter(__func__);
  delete desc;
}

void aclSetTensorDescName(aclTensorDesc *desc, const char *name) {
  enter(__func__);
  desc->name = name;
}

aclDataType aclGetTensorDescType(const aclTensorDesc *desc) { return desc->type; }

aclFormat aclGetTensorDescFormat(const aclTensorDesc *desc) { return desc->format; }

size_t aclGetTensorDescNumDims(const aclTensorDesc *desc) { return desc->shape.size(); }

aclError aclGetTensorDescDimV2(const aclTensorDesc *desc, size_t index, int64_t *dim) {
  if (index >= desc->shape.size()) return fail(ACL_ERROR_INVALID_PARAM, "%s: dimension %zu", __func__, index);
  *dim = desc->shape[index];
  return 0;
}

aclError aclSetTensorFormat(aclTensorDesc *desc, aclFormat format) {
  ENTER();
  desc->storage_format = format;
  return 0;
}

aclError aclSetTensorShape(aclTensorDesc *desc, int count, const int64_t *dims) {
  ENTER();
  desc->storage_shape = {dims, dims + count};
  return 0;
}

aclError aclSetTensorPlaceMent(aclTensorDesc *desc, aclMemType type) {
  ENTER();
  desc->host = type != ACL_MEMTYPE_DEVICE;
  return 0;
}

aclDataBuffer *aclCreateDataBuffer(void *data, size_t size) {
  if (enter(__func__)) return nullptr;
  return new aclDataBuffer{data, size};
}

aclError aclDestroyDataBuffer(const aclDataBuffer *buffer) {
  ENTER();
  delete buffer;
  return 0;
}

aclopAttr *aclopCreateAttr() {
  if (enter(__func__)) return nullptr;
  return new aclopAttr;
}

void aclopDestroyAttr(const aclopAttr *attr) {
  enter(__func__);
  delete attr;
}

aclError aclopSetAttrBool(aclopAttr *attr, const char *name, uint8_t value) {
  ENTER();
  attr->ints[name] = value;
  return 0;
}

aclError aclopSetAttrInt(aclopAttr *attr, const char *name, int64_t value) {
  ENTER();
  attr->ints[name] = value;
  return 0;
}

aclError aclopSetAttrDataType(aclopAttr *attr, const char *name, aclDataType value) {
  ENTER();
  attr->ints[name] = value;
  return 0;
}

aclError aclopSetAttrFloat(aclopAttr *attr, const char *name, float value) {
  ENTER();
  attr->floats[name] = value;
  return 0;
}

aclError aclopSetAttrString(aclopAttr *attr, const char *name, const char *value) {
  ENTER();
  attr->strings[name] = value;
  return 0;
}

aclError aclopSetAttrListBool(aclopAttr *attr, const char *name, int count, const uint8_t *values) {
  ENTER();
  attr->lists[name] = {values, values + count};
  return 0;
}

aclError aclopSetAttrListInt(aclopAttr *attr, const char *name, int count, const int64_t *values) {
  ENTER();
  attr->lists[name] = copied<int64_t>(values, count);
  return 0;
}

aclError aclopSetAttrListFloat(aclopAttr *attr, const char *name, int count, const float *values) {
  ENTER();
  attr->float_lists[name] = copied<float>(values, count);
  return 0;
}

aclError aclopSetAttrListListInt(aclopAttr *, const char *name, int, const int *, const int64_t *const[]) {
  ENTER();
  return fail(ACL_ERROR_API_NOT_SUPPORT, "%s: %s is not emulated", __func__, name);
}

aclError aclopCompileAndExecute(const char *type, int input_count, const aclTensorDesc *const input_descs[],
                                const aclDataBuffer *const inputs[], int output_count,
                                const aclTensorDesc *const output_descs[], aclDataBuffer *const outputs[],
                                const aclopAttr *attr, aclopEngineType, aclopCompileType, const char *,
                                aclrtStream stream) {
  ENTER();
  auto found = makers().find(type);
  if (found == makers().end()) return fail(ACL_ERROR_OP_NOT_FOUND, "the aclop operator %s is not emulated", type);
  OldOp op;
  for (int i = 0; i < input_count; i++) {
    op.input_descs.push_back(*input_descs[i]);
    op.inputs.push_back(*inputs[i]);
  }
  for (int i = 0; i < output_count; i++) {
    op.output_descs.push_back(*output_descs[i]);
    op.outputs.push_back(*outputs[i]);
  }
  if (attr) op.attr = *attr;
  try {
    return submit(stream, found->first.c_str(), found->second(op));
  } catch (const std::exception &error) {
    return fail(ACL_ERROR_INVALID_PARAM, "%s: %s", type, error.what());
  }
}

// Options of the operator compiler, which does not exist here. They are set before the first compiled operator, which
// is refused by name.
aclError aclSetCompileopt(aclCompileOpt, const char *) {
  ENTER();
  return 0;
}
