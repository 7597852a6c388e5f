// The older, compiled operators ("aclop"), as torch_npu describes them to aclopCompileAndExecute.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "emulator.h"

struct aclTensorDesc {
  aclDataType type;
  std::vector<int64_t> shape;
  aclFormat format;
  std::string name;
  bool host = false;  // aclSetTensorPlaceMent: the data is host memory
  aclFormat storage_format = ACL_FORMAT_ND;
  std::vector<int64_t> storage_shape;  // empty: `shape`
};

struct aclDataBuffer {
  void *data;
  size_t size;
};

struct aclopAttr {
  std::map<std::string, int64_t> ints;  // bools and data types too
  std::map<std::string, float> floats;
  std::map<std::string, std::string> strings;
  std::map<std::string, std::vector<int64_t>> lists;  // of bools too
  std::map<std::string, std::vector<float>> float_lists;
};

namespace emu {

struct OldOp {
  std::vector<aclTensorDesc> input_descs, output_descs;
  std::vector<aclDataBuffer> inputs, outputs;
  aclopAttr attr;
};

// Registers an operator. `make` returns the body of its task and throws the message of a refusal. The library libopapi
// registers its operators when it is loaded. Others are refused by name.
EMU_API void register_aclop(const char *type, std::function<std::function<void()>(const OldOp &)> make);

}  // namespace emu
