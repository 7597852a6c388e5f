// Gated delta rule of linear attention: token by token over states in slots, and in chunks over states that are given.
//
// All computation is in float32. The state of a row is rounded once, at the end of the row's tokens.
#include "op.h"

using namespace ops;

namespace {

constexpr const char *kRecurrent = "aclnnRecurrentGatedDeltaRule";
constexpr const char *kChunk = "aclnnChunkGatedDeltaRule";
constexpr const char *kRecurrentDoc =
    "https://github.com/cannmirror/ops-transformer/blob/140eef7c3c32aed9e72d01f04f49d55b26718b5f/attention/"
    "recurrent_gated_delta_rule/docs/aclnnRecurrentGatedDeltaRule.md, constraints";
constexpr const char *kRecurrentParameters =
    "https://github.com/cannmirror/ops-transformer/blob/140eef7c3c32aed9e72d01f04f49d55b26718b5f/attention/"
    "recurrent_gated_delta_rule/docs/aclnnRecurrentGatedDeltaRule.md, parameters";
constexpr const char *kChunkDoc =
    "https://github.com/Ascend/op-plugin/blob/12c385b8d211c01554bc76b17d9b72e31eaa0989/docs/zh/custom_APIs/torch_npu/"
    "torch_npu-npu_chunk_gated_delta_rule.md, constraints";
constexpr const char *kChunkParameters =
    "https://github.com/Ascend/op-plugin/blob/12c385b8d211c01554bc76b17d9b72e31eaa0989/docs/zh/custom_APIs/torch_npu/"
    "torch_npu-npu_chunk_gated_delta_rule.md, parameters";

const Rule kRecurrentDtype(kRecurrent, "recurrent.dtype",
                           "query, key, value, state and beta are bfloat16, g is float32, lengths and indices are int32",
                           kRecurrentParameters);
const Rule kRecurrentShape(kRecurrent, "recurrent.shape",
                           "query and key are (T, Nk, Dk), value (T, Nv, Dv), state (slots, Nv, Dv, Dk), beta and g "
                           "(T, Nv), indices (T), lengths and accepted tokens (B); none is empty",
                           kRecurrentParameters);
const Rule kRecurrentHeads(kRecurrent, "recurrent.heads",
                           "Nk and Nv are 256 at most, and Nv is a multiple of Nk", kRecurrentDoc);
const Rule kRecurrentDims(kRecurrent, "recurrent.dims", "Dk and Dv are 512 at most", kRecurrentDoc);
const Rule kRecurrentSlots(kRecurrent, "recurrent.slots", "there are no more tokens than slots", kRecurrentDoc);
const Rule kRecurrentDense(kRecurrent, "recurrent.contiguous", "the state is contiguous", kRecurrentParameters);
const Rule kRecurrentLengths(kRecurrent, "recurrent.lengths",
                             "a row has 1 to 8 tokens, and the rows have all tokens together", kRecurrentDoc);
const Rule kRecurrentRange(kRecurrent, "recurrent.range", "an index is within the slots, from 0", kRecurrentDoc);
const Rule kRecurrentMore(kRecurrent, "recurrent.more", "gk is absent, and one token of each row is accepted",
                          "this emulator");

const Rule kChunkDtype(kChunk, "chunk.dtype",
                       "query, key, value, beta and the states are bfloat16, g is float32, lengths are int32",
                       kChunkParameters);
const Rule kChunkShape(kChunk, "chunk.shape",
                       "query and key are (T, Nk, Dk), value (T, Nv, Dv), the states (B, Nv, Dv, Dk), beta and g (T, Nv), "
                       "lengths (B); none is empty",
                       kChunkParameters);
const Rule kChunkHeads(kChunk, "chunk.heads", "Nk and Nv are 64 at most, and Nv is a multiple of Nk", kChunkDoc);
const Rule kChunkDims(kChunk, "chunk.dims", "Dk and Dv are 128", kChunkDoc);
const Rule kChunkLengths(kChunk, "chunk.lengths", "the rows have no more than T tokens together, and none a negative number",
                         kChunkParameters);

struct Given {
  at::Tensor q, k, v, beta, state, lengths, g;
};

bool has_dtypes(const Given &x, bool halves) {
  const auto float_type = x.q.scalar_type();
  const bool fits = float_type == at::kBFloat16 || (!halves && float_type == at::kFloat);
  return fits && x.k.scalar_type() == float_type && x.v.scalar_type() == float_type &&
         x.beta.scalar_type() == float_type && x.state.scalar_type() == float_type &&
         x.lengths.scalar_type() == at::kInt && (!x.g.defined() || x.g.scalar_type() == at::kFloat);
}

bool has_shapes(const Given &x) {
  if (x.q.dim() != 3 || x.v.dim() != 3 || x.state.dim() != 4 || x.lengths.dim() != 1 || !x.q.numel() || !x.v.numel() ||
      !x.state.numel() || !x.lengths.numel())
    return false;
  const std::vector<int64_t> heads{x.q.size(0), x.v.size(1)}, state{x.v.size(1), x.v.size(2), x.q.size(2)};
  return x.k.sizes() == x.q.sizes() && x.v.size(0) == x.q.size(0) && x.beta.sizes() == heads &&
         (!x.g.defined() || x.g.sizes() == heads) && x.state.sizes().slice(1) == state;
}

std::string described(const Given &x) {
  return "query " + describe(x.q.sizes()) + ", value " + describe(x.v.sizes()) + ", state " + describe(x.state.sizes());
}

// Advances the state [Nv, Dv, Dk] by the tokens [begin, end) and writes their results to `out` [T, Nv, Dv].
at::Tensor advanced(const Given &x, at::Tensor state, int64_t begin, int64_t end, double scale, const at::Tensor &out) {
  const int64_t group = x.v.size(1) / x.q.size(1);
  for (int64_t t = begin; t < end; t++) {
    const auto q = f32(x.q[t]).repeat_interleave(group, 0).unsqueeze(1);  // [Nv, 1, Dk]
    const auto k = f32(x.k[t]).repeat_interleave(group, 0).unsqueeze(1);
    if (x.g.defined()) state = state * x.g[t].exp().view({-1, 1, 1});
    const auto delta = f32(x.beta[t]).unsqueeze(-1) * (f32(x.v[t]) - (state * k).sum(-1));
    state = state + delta.unsqueeze(-1) * k;
    out[t].copy_((state * q).sum(-1) * scale);
  }
  return state;
}

}  // namespace

OP(aclnnRecurrentGatedDeltaRule, const aclTensor *query, const aclTensor *key, const aclTensor *value,
   const aclTensor *beta, aclTensor *state, const aclTensor *lengths, const aclTensor *indices, const aclTensor *g,
   const aclTensor *gk, const aclTensor *accepted, float scale, const aclTensor *out) {
  return plan(PHASE, [&] {
    const Given x{view(query), view(key),     view(value),           view(beta),
                  view(state), view(lengths), g ? view(g) : at::Tensor()};
    const auto i = view(indices), a = accepted ? view(accepted) : at::Tensor();
    require(kRecurrentDtype,
            has_dtypes(x, !emu::option("fp32")) && i.scalar_type() == at::kInt &&
                (!a.defined() || a.scalar_type() == at::kInt),
            describe(query) + ", " + describe(state) + ", " + describe(lengths) + ", " + describe(indices));
    require(kRecurrentShape,
            has_shapes(x) && i.dim() == 1 && i.size(0) == x.q.size(0) &&
                (!a.defined() || a.sizes() == x.lengths.sizes()),
            described(x));
    require(kRecurrentHeads, x.v.size(1) <= 256 && x.v.size(1) % x.q.size(1) == 0, described(x));
    require(kRecurrentDims, x.q.size(2) <= 512 && x.v.size(2) <= 512, described(x));
    require(kRecurrentSlots, x.q.size(0) <= x.state.size(0), described(x));
    require(kRecurrentDense, x.state.is_contiguous(), "strides " + describe(state->strides));
    require(kRecurrentMore, !gk, describe(gk));
    return [=, y = view(out)] {
      const int64_t total = x.lengths.sum().item<int64_t>();
      require(kRecurrentLengths,
              total == x.q.size(0) && x.lengths.min().item<int64_t>() >= 1 && x.lengths.max().item<int64_t>() <= 8,
              std::to_string(total) + " tokens of " + std::to_string(x.q.size(0)));
      require(kRecurrentRange, i.min().item<int64_t>() >= 0 && i.max().item<int64_t>() < x.state.size(0),
              std::to_string(i.max().item<int64_t>()) + " of " + std::to_string(x.state.size(0)));
      require(kRecurrentMore, !a.defined() || a.eq(1).all().item<bool>(), "other numbers of accepted tokens");
      int64_t begin = 0;
      for (int64_t row = 0; row < x.lengths.size(0); row++) {
        const int64_t end = begin + x.lengths[row].item<int64_t>();
        auto memory = f32(x.state[i[begin].item<int64_t>()]);
        for (int64_t t = begin; t < end; t++) {
          memory = advanced(x, memory, t, t + 1, scale, y);
          x.state[i[t].item<int64_t>()].copy_(memory);
        }
        begin = end;
      }
    };
  });
}

// The plugin passes g after the scale. Both are in registers of their own.
OP(aclnnChunkGatedDeltaRule, const aclTensor *query, const aclTensor *key, const aclTensor *value,
   const aclTensor *beta, const aclTensor *initial, const aclTensor *lengths, float scale, const aclTensor *g,
   const aclTensor *out, const aclTensor *final) {
  return plan(PHASE, [&] {
    const Given x{view(query),   view(key),     view(value),           view(beta),
                  view(initial), view(lengths), g ? view(g) : at::Tensor()};
    require(kChunkDtype, has_dtypes(x, !emu::option("fp32")), describe(query) + ", " + describe(initial) + ", " + describe(lengths));
    require(kChunkShape, has_shapes(x) && x.lengths.size(0) == x.state.size(0), described(x));
    require(kChunkHeads, x.v.size(1) <= 64 && x.q.size(1) <= 64 && x.v.size(1) % x.q.size(1) == 0, described(x));
    require(kChunkDims, x.q.size(2) == 128 && x.v.size(2) == 128, described(x));
    return [=, y = view(out), last = view(final)] {
      require(kChunkLengths,
              x.lengths.sum().item<int64_t>() <= x.q.size(0) && x.lengths.min().item<int64_t>() >= 0,
              std::to_string(x.lengths.sum().item<int64_t>()) + " tokens of " + std::to_string(x.q.size(0)));
      int64_t begin = 0;
      for (int64_t row = 0; row < x.lengths.size(0); row++) {
        const int64_t end = begin + x.lengths[row].item<int64_t>();
        if (end > begin) last[row].copy_(advanced(x, f32(x.state[row]), begin, end, scale, y));
        begin = end;
      }
    };
  });
}
