// Gated slot attention in chunk form.
//   Hk_t = Hk_{t-1} Diag(e^{g_t}) + k_t s_t^T        [D, M]
//   p_t  = feature(scale * Hk_t^T q_t)               [M]
//   Hv_t = Diag(e^{g_t}) Hv_{t-1} + s_t v_t^T        [M, V]
//   o_t  = Hv_t^T p_t
#include "../gated/gated_scan.h"
#include "../registration/dispatch.h"
#include "aten.h"
#include "problem.h"

namespace girih::gsa {
namespace {

Tensor apply(std::string_view feature, const Tensor& x) {
  if (feature == "softmax") return x.softmax(-1);
  if (feature == "silu") return at::silu(x);
  if (feature == "relu") return x.relu();
  if (feature == "relu2") return x.relu().square();
  return x;
}

// Slot weights and gates of ABC from its logits: with d_t = s_t - z_{t-1},
//   z_t = logaddexp(z_{t-1}, s_t)
//   g_t = z_{t-1} - z_t = logsigmoid(-d_t)
//   s_t <- e^{s_t - z_t} = sigmoid(d_t)
// An empty z (start of a sequence, or only masked tokens so far) has g = 0. A masked token (logit -inf) has g
// = s = 0.
struct Abc {
  Tensor s, g, z;
};

Abc normalise(const Chunks& chunks, const Tensor& logits, const Tensor& z0) {
  // Replaces -inf, since inf - inf is nan: far below any logit, and far from overflow.
  const auto empty = at::full({}, -1e30, logits.options());
  const auto absent = ~chunks.valid().unsqueeze(2).unsqueeze(-1) | (logits <= -1e29);
  const auto s = at::where(absent, empty, logits);
  const auto from_start = s.logcumsumexp(3);  // over the tokens of the chunk
  const auto all = from_start.select(3, chunks.length() - 1).unbind(1);
  const auto scan = chunks.scan({at::where(z0 <= -1e29, empty, z0)}, [&](int64_t c, const Chunks::States& z) {
    return Chunks::States{at::logaddexp(z[0], all[c])};
  });
  const auto start = chunks.starts(scan, 0).unsqueeze(3);
  const auto earlier = at::cat({empty.expand_as(start), from_start.narrow(3, 0, chunks.length() - 1)}, 3);
  const auto before = at::logaddexp(start, earlier);  // z_{t-1}
  const auto d = s - before;
  const auto zero = at::zeros({}, logits.options());
  const auto z = scan.finals[0];
  return {at::where(absent, zero, d.sigmoid()),
          at::where(absent | (before <= -1e29), zero, at::log_sigmoid(-d)),
          at::where(z <= -1e29, at::full({}, -INFINITY, z.options()), z)};
}

}  // namespace

Results forward(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& s,
                const OptionalTensor& g, const OptionalTensor& state_k, const OptionalTensor& state_v,
                const OptionalTensor& state_z, const OptionalTensor& cu_seqlens, std::optional<double> scale,
                std::string_view feature, bool save) {
  const auto p = Problem::check(q, k, v, s, g, state_k, state_v, state_z, cu_seqlens, scale, feature);
  const auto B = q.size(0), T = q.size(1), H = k.size(2), D = q.size(3), V = v.size(3);
  const auto type = accumulate_type(q);
  const auto options = q.options().dtype(type);
  const Chunks chunks(q, B, T, exact_chunk(T), cu_seqlens);
  const auto N = chunks.sequences();

  OptionalTensor z;
  Tensor weights, gates;
  if (given(g)) {
    gates = chunks.split(*g, type);
    weights = given(s) ? chunks.split(*s, type) : -gates.expm1();
  } else {
    const auto M = s->size(3);
    auto abc = normalise(chunks, chunks.split(*s, type),
                         given(state_z) ? *state_z : at::full({N, H, M}, -INFINITY, options));
    weights = abc.s;
    gates = abc.g;
    z = abc.z;
  }
  const auto M = weights.size(-1);
  const auto Hk = given(state_k) ? *state_k : at::zeros({N, H, D, M}, options);
  const auto Hv = given(state_v) ? *state_v : at::zeros({N, H, M, V}, options);

  const ChannelDecay decay(gates);
  const auto logits =
      scan_value_decay(chunks, chunks.split(q, type) * scale.value_or(1 / std::sqrt(double(D))),
                       chunks.split(k, type), weights, decay, Hk);
  const auto read =
      scan_key_decay(chunks, apply(feature, logits.o), weights, chunks.split(v, type), decay, Hv);
  return {chunks.join(read.o, q.scalar_type()), logits.state, read.state, z,
          at::empty(C10_AS_INTARRAYREF_SLOW_ALLOC(p.saved(q, g, cu_seqlens, save)), q.options())};
}

TORCH_LIBRARY_IMPL(girih, CPU, m) { m.impl("gsa_forward", &forward); }
#ifndef GIRIH_WITH_CUDA  // with it, cuda.cpp serves CUDA tensors
TORCH_LIBRARY_IMPL(girih, CUDA, m) { m.impl("gsa_forward", TORCH_FN(InFullPrecision<&forward>::call)); }
#endif

}  // namespace girih::gsa
