// The functions of libhccl that torch_npu's ProcessGroupHCCL calls for groups of one machine.
//
//     HcclGetRootInfo ──► HcclCommInitRootInfo(Config), on each rank ──► collectives, tasks of a stream ──► HcclCommDestroy
//
// Each process is a rank with a device of its own. Functions that are not here are refused by name, or absent where
// torch_npu then calls another.
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

#include "../runtime/device.h"
#include "../runtime/memory.h"
#include "communicator.h"

#pragma GCC visibility push(default)
#include "third_party/hccl/inc/hccl/hccl.h"
#pragma GCC visibility pop
#include "reduce.h"

using namespace hccl;

namespace {

constexpr uint32_t DEFAULT_BUFFER_MB = HCCL_COMM_DEFAULT_BUFFSIZE, AIV = 3;
constexpr int DEFAULT_EXEC_SECONDS = 1836, DEFAULT_CONNECT_SECONDS = 120;

std::mutex lock;
std::map<HcclComm, std::shared_ptr<Communicator>> &communicators() {  // never destroyed: devices outlive the process
  static auto &made = *new std::map<HcclComm, std::shared_ptr<Communicator>>;
  return made;
}

const std::map<uint32_t, size_t> WIDTHS = {
    {HCCL_DATA_TYPE_INT8, 1},   {HCCL_DATA_TYPE_UINT8, 1},  {HCCL_DATA_TYPE_INT16, 2},  {HCCL_DATA_TYPE_UINT16, 2},
    {HCCL_DATA_TYPE_INT32, 4},  {HCCL_DATA_TYPE_UINT32, 4}, {HCCL_DATA_TYPE_INT64, 8},  {HCCL_DATA_TYPE_UINT64, 8},
    {HCCL_DATA_TYPE_FP16, 2},   {HCCL_DATA_TYPE_BFP16, 2},  {HCCL_DATA_TYPE_FP32, 4},   {HCCL_DATA_TYPE_FP64, 8}};
const std::set<uint32_t> REDUCED = {HCCL_DATA_TYPE_INT8, HCCL_DATA_TYPE_INT16, HCCL_DATA_TYPE_INT32, HCCL_DATA_TYPE_INT64,
                                    HCCL_DATA_TYPE_FP16, HCCL_DATA_TYPE_FP32,  HCCL_DATA_TYPE_BFP16};

HcclResult refused(HcclResult code, const std::string &text) {
  emu::fail(code, "%s", text.c_str());
  return code;
}

int number(const char *variable, int fallback) {
  const char *text = getenv(variable);
  return text && *text ? atoi(text) : fallback;
}

bool is_aiv(const HcclCommConfig *config) {
  const char *mode = getenv("HCCL_OP_EXPANSION_MODE");
  if (config && config->hcclOpExpansionMode) return config->hcclOpExpansionMode == AIV;
  return mode && !strcmp(mode, "AIV");
}

Settings settings_of(const HcclCommConfig *config) {
  uint64_t megabytes = number("HCCL_BUFFSIZE", DEFAULT_BUFFER_MB);
  if (config && config->hcclBufferSize && config->hcclBufferSize != HCCL_COMM_BUFFSIZE_CONFIG_NOT_SET)
    megabytes = config->hcclBufferSize;
  int seconds = number("HCCL_EXEC_TIMEOUT", DEFAULT_EXEC_SECONDS);
  if (config && config->hcclExecTimeOut >= 0) seconds = config->hcclExecTimeOut;
  return {megabytes << 20, seconds, is_aiv(config)};
}

HcclResult create(const char *entry, uint32_t ranks, const HcclRootInfo *root, uint32_t rank,
                  const HcclCommConfig *config, HcclComm *comm) {
  if (!root || !comm) return refused(HCCL_E_PTR, std::string(entry) + ": a null pointer");
  if (!ranks || rank >= ranks || ranks > MAX_RANKS)
    return refused(HCCL_E_PARA, std::string(entry) + ": rank " + std::to_string(rank) + " of " + std::to_string(ranks) +
                                    ", and the emulator has up to " + std::to_string(MAX_RANKS));
  {
    emu::Lock device(emu::device().lock);
    if (emu::unsafe_is_forbidden()) return refused(HCCL_E_RUNTIME, refusal(CAPTURE, entry));
  }
  std::string address(root->internal, strnlen(root->internal, HCCL_ROOT_INFO_BYTES));
  std::string name = config && config->hcclCommName[0] ? config->hcclCommName : "emulated-" + address;
  std::string error;
  auto made = Communicator::create(address, rank, ranks, name, settings_of(config),
                                   number("HCCL_CONNECT_TIMEOUT", DEFAULT_CONNECT_SECONDS), &error);
  if (!made) return refused(HCCL_E_PARA, std::string(entry) + ": " + error);
  std::lock_guard<std::mutex> guard(lock);
  communicators()[made.get()] = made;
  *comm = made.get();
  return HCCL_SUCCESS;
}

std::shared_ptr<Communicator> find(HcclComm comm) {
  std::lock_guard<std::mutex> guard(lock);
  auto found = communicators().find(comm);
  return found == communicators().end() ? nullptr : found->second;
}

void reduce(const Operation &operation, const std::vector<const char *> &parts, char *out, size_t count) {
  switch (operation.dtype) {
    case HCCL_DATA_TYPE_INT8: return hccl::reduce<int8_t, int64_t>(operation.reduce, parts, out, count);
    case HCCL_DATA_TYPE_INT16: return hccl::reduce<int16_t, int64_t>(operation.reduce, parts, out, count);
    case HCCL_DATA_TYPE_INT32: return hccl::reduce<int32_t, int64_t>(operation.reduce, parts, out, count);
    case HCCL_DATA_TYPE_INT64: return hccl::reduce<int64_t, int64_t>(operation.reduce, parts, out, count);
    case HCCL_DATA_TYPE_FP16: return hccl::reduce<_Float16, float>(operation.reduce, parts, out, count);
    case HCCL_DATA_TYPE_BFP16: return hccl::reduce<BFloat16, float>(operation.reduce, parts, out, count);
    default: return hccl::reduce<float, float>(operation.reduce, parts, out, count);
  }
}

// Writes the numbers [first, first + count) of each rank's data, which are in the slots, to `out`.
void receive(Communicator &group, const Operation &operation, char *out, size_t first, size_t count) {
  size_t width = operation.kind == Kind::barrier ? 0 : WIDTHS.at(operation.dtype);
  std::vector<const char *> parts;
  for (uint32_t rank = 0; rank < group.ranks; rank++) parts.push_back(group.slot(rank));
  switch (operation.kind) {
    case Kind::all_reduce: return reduce(operation, parts, out + first * width, count);
    case Kind::broadcast: memcpy(out + first * width, parts[operation.root], count * width); return;
    case Kind::all_gather:
      for (uint32_t rank = 0; rank < group.ranks; rank++)
        memcpy(out + (rank * operation.count + first) * width, parts[rank], count * width);
      return;
    case Kind::barrier: return;
  }
}

// Submits a round: a task that shares this rank's data and one that waits for the others and computes the result.
int submit_round(emu::Lock &guard, emu::Stream *stream, const char *entry, const std::shared_ptr<Communicator> &group,
                 const Operation &operation, const char *send, char *out, size_t first, size_t count) {
  size_t width = operation.kind == Kind::barrier ? 0 : WIDTHS.at(operation.dtype);
  bool shares = operation.kind != Kind::broadcast || operation.root == group->rank;
  emu::Task share{"HcclNotify", [=] { group->share(operation, send + first * width, shares ? count * width : 0); }};
  emu::Task finish{entry, [=] {
                     group->finish(operation);
                     receive(*group, operation, out, first, count);
                   }};
  finish.ready = [group] { return group->may_finish(); };
  finish.pull = [group] { group->want(); };
  share.shared = finish.shared = true;
  if (int code = emu::add(guard, stream, std::move(share))) return code;
  return emu::add(guard, stream, std::move(finish));
}

HcclResult collect(const char *entry, HcclComm comm, const Operation &operation, const void *send, void *out,
                   aclrtStream handle) {
  if (emu::injected("launch")) return HCCL_E_RUNTIME;
  std::shared_ptr<Communicator> group = find(comm);
  if (!group) return refused(HCCL_E_PTR, std::string(entry) + ": no such communicator");
  std::string given = std::string(entry) + " of HcclDataType " + std::to_string(operation.dtype);
  bool reduces = operation.kind == Kind::all_reduce, moves = operation.kind != Kind::barrier;
  if (reduces && !REDUCED.count(operation.dtype)) return refused(HCCL_E_NOT_SUPPORT, refusal(REDUCED_DTYPES, given));
  if (moves && !WIDTHS.count(operation.dtype)) return refused(HCCL_E_NOT_SUPPORT, refusal(DTYPES, given));
  if (operation.root >= group->ranks) return refused(HCCL_E_PARA, std::string(entry) + ": no such root");
  size_t width = moves ? WIDTHS.at(operation.dtype) : 1, bytes = moves ? operation.count * width : 0;
  size_t result = operation.kind == Kind::all_gather ? bytes * group->ranks : bytes;
  if (bytes && (!emu::on_device(send, bytes) || !emu::on_device(out, result)))
    return refused(HCCL_E_PARA, std::string(entry) + ": a buffer is not all allocated on the device");
  emu::Lock guard(emu::device().lock);
  emu::Stream *stream = emu::find(handle);
  if (!stream) return refused(HCCL_E_PARA, std::string(entry) + ": no such stream");
  if (group->settings.aiv && emu::has_task_group(stream)) return refused(HCCL_E_RUNTIME, refusal(TASK_GROUP, entry));
  size_t each = group->settings.capacity / width, first = 0;
  do {
    size_t count = std::min<size_t>(each, operation.count - first);
    if (submit_round(guard, stream, entry, group, operation, static_cast<const char *>(send), static_cast<char *>(out),
                     first, count))
      return HCCL_E_RUNTIME;
    first += count;
  } while (first < operation.count);
  return HCCL_SUCCESS;
}

}  // namespace

#define HCCL_ENTER() \
  if (emu::enter(__func__)) return HCCL_E_RUNTIME

HcclResult HcclGetRootInfo(HcclRootInfo *root) {
  HCCL_ENTER();
  std::string address = Channel::create();
  if (address.empty()) return refused(HCCL_E_MEMORY, "HcclGetRootInfo: the machine has no memory to share");
  memset(root->internal, 0, sizeof root->internal);
  memcpy(root->internal, address.data(), address.size());
  return HCCL_SUCCESS;
}

HcclResult HcclCommInitRootInfo(uint32_t ranks, const HcclRootInfo *root, uint32_t rank, HcclComm *comm) {
  HCCL_ENTER();
  return create(__func__, ranks, root, rank, nullptr, comm);
}

HcclResult HcclCommInitRootInfoConfig(uint32_t ranks, const HcclRootInfo *root, uint32_t rank,
                                      const HcclCommConfig *config, HcclComm *comm) {
  HCCL_ENTER();
  return create(__func__, ranks, root, rank, config, comm);
}

HcclResult HcclCommDestroy(HcclComm comm) {
  HCCL_ENTER();
  std::shared_ptr<Communicator> group = find(comm);
  if (!group) return refused(HCCL_E_PTR, "HcclCommDestroy: no such communicator");
  group->close();
  std::lock_guard<std::mutex> guard(lock);
  communicators().erase(comm);
  return HCCL_SUCCESS;
}

HcclResult HcclAllReduce(void *send, void *out, uint64_t count, HcclDataType dtype, HcclReduceOp reduce, HcclComm comm,
                         aclrtStream stream) {
  HCCL_ENTER();
  uint32_t number = static_cast<uint32_t>(reduce);
  if (number > HCCL_REDUCE_MIN) return refused(HCCL_E_PARA, "HcclAllReduce: no such reduction");
  return collect(__func__, comm, {Kind::all_reduce, static_cast<uint32_t>(dtype), number, 0, count}, send, out, stream);
}

HcclResult HcclAllGather(void *send, void *out, uint64_t count, HcclDataType dtype, HcclComm comm, aclrtStream stream) {
  HCCL_ENTER();
  return collect(__func__, comm, {Kind::all_gather, static_cast<uint32_t>(dtype), 0, 0, count}, send, out, stream);
}

HcclResult HcclBroadcast(void *data, uint64_t count, HcclDataType dtype, uint32_t root, HcclComm comm,
                         aclrtStream stream) {
  HCCL_ENTER();
  return collect(__func__, comm, {Kind::broadcast, static_cast<uint32_t>(dtype), 0, root, count}, data, data, stream);
}

HcclResult HcclBarrier(HcclComm comm, aclrtStream stream) {
  HCCL_ENTER();
  return collect(__func__, comm, {Kind::barrier, 0, 0, 0, 0}, nullptr, nullptr, stream);
}

HcclResult HcclGetRankSize(HcclComm comm, uint32_t *ranks) {
  HCCL_ENTER();
  auto group = find(comm);
  if (!group) return refused(HCCL_E_PTR, "HcclGetRankSize: no such communicator");
  *ranks = group->ranks;
  return HCCL_SUCCESS;
}

HcclResult HcclGetRankId(HcclComm comm, uint32_t *rank) {
  HCCL_ENTER();
  auto group = find(comm);
  if (!group) return refused(HCCL_E_PTR, "HcclGetRankId: no such communicator");
  *rank = group->rank;
  return HCCL_SUCCESS;
}

HcclResult HcclGetCommName(HcclComm comm, char *name) {
  HCCL_ENTER();
  auto group = find(comm);
  if (!group) return refused(HCCL_E_PTR, "HcclGetCommName: no such communicator");
  strncpy(name, group->name.c_str(), COMM_NAME_MAX_LENGTH - 1);
  name[COMM_NAME_MAX_LENGTH - 1] = 0;
  return HCCL_SUCCESS;
}

// Errors of links between machines, which do not exist here.
HcclResult HcclGetCommAsyncError(HcclComm, HcclResult *error) {
  HCCL_ENTER();
  *error = HCCL_SUCCESS;
  return HCCL_SUCCESS;
}

const char *HcclGetErrorString(HcclResult code) {
  emu::enter(__func__);
  switch (code) {
    case HCCL_SUCCESS: return "no error";
    case HCCL_E_PARA: return "parameter error";
    case HCCL_E_PTR: return "empty pointer";
    case HCCL_E_NOT_SUPPORT: return "feature not supported";
    case HCCL_E_RUNTIME: return "runtime error";
    default: return "error";
  }
}

uint32_t HcclGetCommConfigCapability() {
  emu::enter(__func__);
  return HCCL_COMM_CONFIG_RESERVED;
}

// Reductions are always in the order of the ranks.
HcclResult HcclSetConfig(HcclConfig, HcclConfigValue) {
  HCCL_ENTER();
  return HCCL_SUCCESS;
}

#define NOT_EMULATED(name, parameters)                                            \
  HcclResult name parameters {                                                    \
    HCCL_ENTER();                                                                 \
    return refused(HCCL_E_NOT_SUPPORT, std::string(__func__) + " is not emulated"); \
  }

NOT_EMULATED(HcclCommInitClusterInfo, (const char *, uint32_t, HcclComm *))
NOT_EMULATED(HcclCommInitClusterInfoConfig, (const char *, uint32_t, HcclCommConfig *, HcclComm *))
NOT_EMULATED(HcclCreateSubCommConfig, (HcclComm *, uint32_t, uint32_t *, uint64_t, uint32_t, HcclCommConfig *, HcclComm *))
NOT_EMULATED(HcclCommInitAll, (uint32_t, int32_t *, HcclComm *))
NOT_EMULATED(HcclReduce, (void *, void *, uint64_t, HcclDataType, HcclReduceOp, uint32_t, HcclComm, aclrtStream))
NOT_EMULATED(HcclReduceScatter, (void *, void *, uint64_t, HcclDataType, HcclReduceOp, HcclComm, aclrtStream))
NOT_EMULATED(HcclScatter, (void *, void *, uint64_t, HcclDataType, uint32_t, HcclComm, aclrtStream))
NOT_EMULATED(HcclSend, (void *, uint64_t, HcclDataType, uint32_t, HcclComm, aclrtStream))
NOT_EMULATED(HcclRecv, (void *, uint64_t, HcclDataType, uint32_t, HcclComm, aclrtStream))
NOT_EMULATED(HcclBatchSendRecv, (HcclSendRecvItem *, uint32_t, HcclComm, aclrtStream))
NOT_EMULATED(HcclAlltoAll, (const void *, uint64_t, HcclDataType, const void *, uint64_t, HcclDataType, HcclComm, aclrtStream))
NOT_EMULATED(HcclAlltoAllV, (const void *, const void *, const void *, HcclDataType, const void *, const void *,
                             const void *, HcclDataType, HcclComm, aclrtStream))
NOT_EMULATED(HcclCommResume, (HcclComm))

// The constraints, as JSON: [{"id":, "text":, "source":}].
extern "C" EMU_API const char *emu_hccl_rules() {
  static const std::string table = [] {
    std::string out = "[";
    for (const Rule *rule : RULES)
      out += (out.size() > 1 ? ", " : "") + std::string("{\"id\": \"") + rule->id + "\", \"text\": \"" + rule->text +
             "\", \"source\": \"" + rule->source + "\"}";
    return out + "]";
  }();
  return table.c_str();
}
