// Reduction of the ranks' data, in the order of the ranks. Floating-point numbers are reduced in float32 and rounded
// once, so that the result is the same on each rank and in each run. HCCL promises less: equal results of equal runs
// only with HCCL_DETERMINISTIC=true, and no order
// (https://www.hiascend.com/document/detail/en/canncommercial/850/maintenref/envvar/envref_07_0099.html).
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace hccl {

struct BFloat16 {
  uint16_t bits;
  operator float() const {
    uint32_t wide = uint32_t{bits} << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
  }
  static BFloat16 round(float value) {
    uint32_t wide;
    memcpy(&wide, &value, sizeof wide);
    if ((wide & 0x7fffffff) > 0x7f800000) return {static_cast<uint16_t>(wide >> 16 | 0x40)};  // NaN
    return {static_cast<uint16_t>((wide + 0x7fff + (wide >> 16 & 1)) >> 16)};
  }
};

template <typename T, typename Wide>
T narrow(Wide value) {
  if constexpr (std::is_same_v<T, BFloat16>)
    return BFloat16::round(value);
  else
    return static_cast<T>(value);
}

// Wide: type in which numbers of T are reduced.
template <typename T, typename Wide>
void reduce(uint32_t operation, const std::vector<const char *> &parts, char *out, size_t count) {
  auto combine = [operation](Wide a, Wide b) -> Wide {
    switch (operation) {
      case HCCL_REDUCE_SUM: return a + b;
      case HCCL_REDUCE_PROD: return a * b;
      case HCCL_REDUCE_MAX: return std::max(a, b);
      default: return std::min(a, b);
    }
  };
  for (size_t n = 0; n < count; n++) {
    Wide total = static_cast<Wide>(reinterpret_cast<const T *>(parts[0])[n]);
    for (size_t rank = 1; rank < parts.size(); rank++)
      total = combine(total, static_cast<Wide>(reinterpret_cast<const T *>(parts[rank])[n]));
    reinterpret_cast<T *>(out)[n] = narrow<T, Wide>(total);
  }
}

}  // namespace hccl
