// Stand-ins for the Triton kernels of linear attention, whose binaries need CANN's compiler: one task of the stream each,
// with the kernel's arguments. The kernels themselves are lowered and run on this processor by tests/kernels/triton.
//
// All compute in float32. A state is rounded once a call.
#include "op.h"

using namespace ops;

namespace {

constexpr const char *kConvolution = "conv_silu_kernel";
constexpr const char *kGates = "delta_gates_kernel";
constexpr const char *kRule = "delta_rule_kernel";
constexpr const char *kNorm = "gated_rms_norm_kernel";

at::Tensor on(void *data, at::IntArrayRef sizes, at::ScalarType type) {
  return data ? at::from_blob(data, sizes, at::TensorOptions(type).device(at::kCPU)) : at::Tensor();
}

at::Tensor matrix(void *data, int64_t rows, int64_t columns, int64_t stride, at::ScalarType type) {
  return at::from_blob(data, {rows, columns}, {stride, 1}, at::TensorOptions(type).device(at::kCPU));
}

at::ScalarType dtype_of(int64_t number) { return scalar_type(static_cast<aclDataType>(number)); }

// Rows of a step: contexts [R] int32, starts [R + 1] int32, slots [R] int64.
struct Rows {
  at::Tensor contexts, starts, slots;

  int64_t begin(int64_t row) const { return starts[row].item<int64_t>(); }
  // Calls `advance` with each row that has tokens: whether its state is known, its slot, its first token, and its end.
  void each(const char *name, int64_t count, const std::function<void(bool, int64_t, int64_t, int64_t)> &advance) const {
    for (int64_t row = 0; row < slots.size(0); row++) {
      const int64_t first = begin(row), end = begin(row + 1), slot = slots[row].item<int64_t>();
      if (end <= first) continue;
      if (slot < 0 || slot >= count) throw std::runtime_error(std::string(name) + ": a slot is out of range");
      advance(contexts[row].item<int64_t>() > end - first, slot, first, end);
    }
  }
};

Rows rows_of(void *const *p, int64_t rows) {
  return {on(p[0], {rows}, at::kInt), on(p[1], {rows + 1}, at::kInt), on(p[2], {rows}, at::kLong)};
}

at::Tensor log_decay(const at::Tensor &a, const at::Tensor &a_log, const at::Tensor &dt_bias) {
  return at::softplus(f32(a) + dt_bias) * -a_log.exp();
}

at::Tensor normalized(const at::Tensor &x, double eps) {
  return x * at::rsqrt(x.square().sum(-1, true) + eps);
}

}  // namespace

// p: x, taps, state, contexts, starts, slots, out. n: tokens, rows, channels, taps, slots of the state, stride of x,
//    aclDataType.
extern "C" EMU_API int emu_conv_silu(void *const *p, const int64_t *n, aclrtStream stream) {
  if (const int error = emu::enter(kConvolution)) return error;
  const int64_t channels = n[2], kept = n[3] - 1, slots = n[4];
  const auto dtype = dtype_of(n[6]);
  const auto x = matrix(p[0], n[0], channels, n[5], dtype), out = on(p[6], {n[0], channels}, dtype);
  const auto taps = on(p[1], {n[3], channels}, at::kFloat), state = on(p[2], {slots, kept, channels}, dtype);
  return emu::submit(stream, kConvolution, [=, rows = rows_of(p + 3, n[1])] {
    Plainly plainly;
    out.zero_();
    rows.each(kConvolution, slots, [&](bool known, int64_t slot, int64_t first, int64_t end) {
      const auto earlier = known ? state[slot] : at::zeros_like(state[slot]);
      const auto inputs = at::cat({earlier, x.slice(0, first, end)});
      const auto sums = (f32(inputs.unfold(0, kept + 1, 1)) * taps.t()).sum(-1);
      write(out.slice(0, first, end), at::silu(sums));
      state[slot].copy_(inputs.slice(0, end - first));
    });
  });
}

// p: a, b, a_log, dt_bias, forget (null: none), decay, beta. n: tokens, heads, strides of a and b, aclDataType.
extern "C" EMU_API int emu_delta_gates(void *const *p, const int64_t *n, aclrtStream stream) {
  if (const int error = emu::enter(kGates)) return error;
  const int64_t tokens = n[0], heads = n[1];
  const auto dtype = dtype_of(n[4]);
  const auto a = matrix(p[0], tokens, heads, n[2], dtype), b = matrix(p[1], tokens, heads, n[3], dtype);
  const auto a_log = on(p[2], {heads}, at::kFloat), dt_bias = on(p[3], {heads}, at::kFloat);
  const auto forget = on(p[4], {tokens, 1}, at::kFloat), decay = on(p[5], {tokens, heads}, at::kFloat);
  const auto beta = on(p[6], {tokens, heads}, dtype);
  return emu::submit(stream, kGates, [=] {
    Plainly plainly;
    const auto decays = log_decay(a, a_log, dt_bias);
    write(decay, forget.defined() ? decays + forget : decays);
    write(beta, f32(b).sigmoid());
  });
}

// p: qkv, a, b, a_log, dt_bias, state, contexts, starts, slots, out. n: tokens, rows, key heads, value heads, sizes of
//    both, slots of the state, strides of qkv, a and b, aclDataType of the activations and of the state.
extern "C" EMU_API int emu_delta_rule(void *const *p, const int64_t *n, double eps, aclrtStream stream) {
  if (const int error = emu::enter(kRule)) return error;
  const int64_t tokens = n[0], key_heads = n[2], value_heads = n[3], key_dim = n[4], value_dim = n[5], slots = n[6];
  const int64_t keys = key_heads * key_dim, values = value_heads * value_dim, group = value_heads / key_heads;
  const auto dtype = dtype_of(n[10]);
  const auto qkv = matrix(p[0], tokens, 2 * keys + values, n[7], dtype);
  const auto a = matrix(p[1], tokens, value_heads, n[8], dtype), b = matrix(p[2], tokens, value_heads, n[9], dtype);
  const auto a_log = on(p[3], {value_heads}, at::kFloat), dt_bias = on(p[4], {value_heads}, at::kFloat);
  const auto state = on(p[5], {slots, value_heads, value_dim, key_dim}, dtype_of(n[11]));
  const auto out = on(p[9], {tokens, value_heads, value_dim}, dtype);
  return emu::submit(stream, kRule, [=, rows = rows_of(p + 6, n[1])] {
    Plainly plainly;
    out.zero_();
    rows.each(kRule, slots, [&](bool known, int64_t slot, int64_t first, int64_t end) {
      auto memory = known ? f32(state[slot]) : at::zeros({value_heads, value_dim, key_dim}, at::kFloat);
      for (int64_t t = first; t < end; t++) {
        const auto parts = f32(qkv[t]).split_with_sizes({keys, keys, values});
        auto heads = [&](const at::Tensor &part) {
          return normalized(part.view({key_heads, key_dim}), eps).repeat_interleave(group, 0).unsqueeze(1);
        };
        const auto q = heads(parts[0]) * std::pow(key_dim, -0.5), k = heads(parts[1]);
        memory = memory * log_decay(a[t], a_log, dt_bias).exp().view({-1, 1, 1});
        const auto wrong = parts[2].view({value_heads, value_dim}) - (memory * k).sum(-1);
        memory = memory + (f32(b[t]).sigmoid().unsqueeze(-1) * wrong).unsqueeze(-1) * k;
        write(out[t], (memory * q).sum(-1));
      }
      state[slot].copy_(memory);
    });
  });
}

// p: x, z, gamma, out. n: tokens, columns, size of a group, strides of x and z, aclDataType of x and of gamma.
extern "C" EMU_API int emu_gated_rms_norm(void *const *p, const int64_t *n, double eps, aclrtStream stream) {
  if (const int error = emu::enter(kNorm)) return error;
  const auto dtype = dtype_of(n[5]);
  const auto x = matrix(p[0], n[0], n[1], n[3], dtype), z = matrix(p[1], n[0], n[1], n[4], dtype);
  const auto gamma = on(p[2], {n[2]}, dtype_of(n[6])), out = on(p[3], {n[0], n[1]}, dtype);
  return emu::submit(stream, kNorm, [=, size = n[2]] {
    Plainly plainly;
    const auto groups = f32(x).unflatten(1, {-1, size});
    const auto normed = (groups * at::rsqrt(groups.square().mean(-1, true) + eps)).to(dtype);
    const auto scaled = (f32(normed) * f32(gamma)).to(gamma.scalar_type());
    write(out, f32(scaled).flatten(1) * at::silu(f32(z)));
  });
}
