// The older, compiled operators ("aclop"): what torch_npu describes to aclopCompileAndExecute.
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

// Makes the body of an operator's task (throws what refuse should say); libopapi registers those that it has when it is
// loaded. One that nobody registered is refused by name.
EMU_API void register_aclop(const char *type, std::function<std::function<void()>(const OldOp &)> make);

}  // namespace emu
