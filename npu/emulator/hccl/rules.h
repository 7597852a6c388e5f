// Documented constraints of HCCL. A call that violates one is refused with its text and source.
#pragma once

#include <string>

namespace hccl {

struct Rule {
  const char *id, *text, *source;
};

inline constexpr const char *ALL_REDUCE =
    "https://www.hiascend.com/document/detail/en/canncommercial/850/API/hcclapiref/hcclcpp_07_0021.html";
inline constexpr const char *ALL_GATHER =
    "https://hiascend.com/document/detail/zh/CANNCommunityEdition/800alpha001/apiref/hcclapiref/hcclcpp_07_0023.html";
inline constexpr const char *INIT =
    "https://www.hiascend.com/document/detail/en/canncommercial/850/API/hcclapiref/hcclcpp_07_0007.html";

inline constexpr Rule REDUCED_DTYPES{
    "hccl.reduced_dtypes", "reductions take int8, int16, int32, int64, float16, float32 and bfloat16", ALL_REDUCE};
inline constexpr Rule DTYPES{
    "hccl.dtypes", "the dtype is int8 to int64, uint8 to uint64, float16, float32, float64 or bfloat16", ALL_GATHER};
inline constexpr Rule SAME_CALLS{
    "hccl.same_calls", "all ranks call the same operation with the same count, dtype, reduction and root", ALL_REDUCE};
inline constexpr Rule SAME_GROUP{
    "hccl.same_group", "all ranks give the same number of ranks and the same configuration", INIT};
inline constexpr Rule OWN_DEVICE{
    "hccl.own_device", "each rank of a communicator has a device of its own",
    "https://www.hiascend.com/document/detail/en/canncommercial/850/API/hcclapiref/hcclcpp_07_0007.html"};
inline constexpr Rule CAPTURE{
    "hccl.capture", "a communicator is created outside of captures, since its creation copies synchronously",
    "https://www.hiascend.com/document/detail/zh/canncommercial/83RC1/API/appdevgapi/aclcppdevg_03_1788.html"};
inline constexpr Rule TASK_GROUP{
    "hccl.task_group", "with HCCL_OP_EXPANSION_MODE=AIV a capture with a task group holds no collective: the capture fails "
    "with 507009, or the replay deadlocks", "https://github.com/vllm-project/vllm-ascend/issues/13688"};
inline constexpr Rule TIMEOUT{
    "hccl.timeout", "EI0002: a rank waits HCCL_EXEC_TIMEOUT seconds for the others, by default 1836; 0: without limit",
    "https://www.hiascend.com/document/detail/en/canncommercial/850/maintenref/envvar/envref_07_0078.html"};
inline constexpr Rule CONNECT{
    "hccl.connect", "EI0006: all ranks join within HCCL_CONNECT_TIMEOUT seconds, by default 120",
    "https://www.hiascend.com/document/detail/en/canncommercial/850/maintenref/envvar/envref_07_0077.html"};

inline constexpr const Rule *RULES[] = {&REDUCED_DTYPES, &DTYPES,     &SAME_CALLS, &SAME_GROUP, &OWN_DEVICE,
                                        &CAPTURE,        &TASK_GROUP, &TIMEOUT,    &CONNECT};

// Message of a refusal. given: what was called instead.
inline std::string refusal(const Rule &rule, const std::string &given) {
  return given + ": " + rule.text + " [" + rule.id + "; " + rule.source + "]";
}

}  // namespace hccl
