// Stand-in for the Triton kernel qk_norm_rope_kv_write, whose binary needs CANN's compiler: one task of the stream with
// the kernel's arguments. The kernel itself is lowered and run on this processor by tests/kernels/triton.
#include "op.h"

using namespace ops;

namespace {

constexpr const char *kName = "qk_norm_rope_kv_write_kernel";

at::Tensor normalized(const at::Tensor &x, const at::Tensor &gamma, double eps) {
  if (!gamma.defined()) return x;
  const auto wide = f32(x);
  const auto scaled = wide * at::rsqrt(wide.square().mean(-1, true) + eps);
  return scaled.to(x.scalar_type()) * gamma;
}

at::Tensor rotated(const at::Tensor &x, const at::Tensor &cos_sin) {
  const int64_t rotary = cos_sin.size(-1);
  const auto angles = cos_sin.unsqueeze(1).chunk(2, -1), pair = f32(x).narrow(-1, 0, rotary).chunk(2, -1);
  const auto rest = f32(x).narrow(-1, rotary, x.size(-1) - rotary);
  return at::cat({pair[0] * angles[0] - pair[1] * angles[1], pair[1] * angles[0] + pair[0] * angles[1], rest}, -1);
}

}  // namespace

// p: qkv, q_gamma, k_gamma (null: no norm), cos_sin, positions, slots, k_cache, v_cache, q.
// n: tokens, query heads, KV heads, head_dim, rows of cos_sin, slots of the cache, stride of qkv, aclDataType, columns of
//    cos_sin.
extern "C" EMU_API int emu_fused_heads(void *const *p, const int64_t *n, double eps, aclrtStream stream) {
  if (const int error = emu::enter(kName)) return error;
  const int64_t tokens = n[0], q_heads = n[1], kv_heads = n[2], dim = n[3], rows = n[4], slots = n[5], stride = n[6];
  const auto dtype = scalar_type(static_cast<aclDataType>(n[7]));
  auto on = [](void *data, at::IntArrayRef sizes, at::ScalarType type) {
    return data ? at::from_blob(data, sizes, at::TensorOptions(type).device(at::kCPU)) : at::Tensor();
  };
  const auto qkv = at::from_blob(p[0], {tokens, q_heads + 2 * kv_heads, dim}, {stride, dim, 1},
                                 at::TensorOptions(dtype).device(at::kCPU));
  const auto q_gamma = on(p[1], {dim}, dtype), k_gamma = on(p[2], {dim}, dtype);
  const auto table = on(p[3], {rows, n[8]}, at::kFloat), positions = on(p[4], {tokens}, at::kLong);
  const auto places = on(p[5], {tokens}, at::kLong), q = on(p[8], {tokens, q_heads, dim}, dtype);
  const auto keys = on(p[6], {slots, kv_heads, dim}, dtype), values = on(p[7], {slots, kv_heads, dim}, dtype);
  return emu::submit(stream, kName, [=] {
    Plainly plainly;
    const bool inside = positions.ge(0).logical_and(positions.lt(rows)).all().item<bool>() &&
                        places.lt(slots).all().item<bool>();
    if (!inside) throw std::runtime_error(std::string(kName) + ": a position or a slot is out of range");
    const auto cos_sin = table.index_select(0, positions);
    const auto written = places.ge(0).nonzero().squeeze(1), to = places.index_select(0, written);
    const auto parts = qkv.split_with_sizes({q_heads, kv_heads, kv_heads}, 1);
    write(q, rotated(normalized(parts[0], q_gamma, eps), cos_sin));
    const auto k = rotated(normalized(parts[1], k_gamma, eps), cos_sin).to(dtype);
    keys.index_copy_(0, to, k.index_select(0, written));
    values.index_copy_(0, to, parts[2].index_select(0, written));
  });
}
