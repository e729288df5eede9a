// Gated slot attention in chunk form.
//   Hk_t = Hk_{t-1} Diag(e^{g_t}) + k_t s_t^T        [D, M]
//   p_t  = feature(scale * Hk_t^T q_t)               [M]
//   Hv_t = Diag(e^{g_t}) Hv_{t-1} + s_t v_t^T        [M, V]
//   o_t  = Hv_t^T p_t
#include "../gated/gated_scan.h"
#include "aten.h"
#include "problem.h"

namespace girih::gsa {
namespace {

Tensor apply_feature(std::string_view feature, const Tensor& x) {
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
struct AbcGates {
  Tensor s, g, z;
};

AbcGates compute_abc_gates(const Chunks& chunks, const Tensor& logits, const Tensor& z0) {
  // Replaces -inf, since inf - inf is nan: far below any logit, and far from overflow.
  const auto empty = at::full({}, -1e30, logits.options());
  const auto is_masked = ~chunks.valid().unsqueeze(2).unsqueeze(-1) | (logits <= -1e29);
  const auto s = at::where(is_masked, empty, logits);
  const auto from_start = s.logcumsumexp(3);  // over the tokens of the chunk
  const auto all = from_start.select(3, chunks.length() - 1).unbind(1);
  const auto scan = chunks.scan({at::where(z0 <= -1e29, empty, z0)}, [&](int64_t c, const Chunks::States& z) {
    return Chunks::States{at::logaddexp(z[0], all[c])};
  });
  const auto start = chunks.starts(scan, 0).unsqueeze(3);
  const auto chunk_z = at::cat({empty.expand_as(start), from_start.narrow(3, 0, chunks.length() - 1)}, 3);
  const auto previous_z = at::logaddexp(start, chunk_z);  // z_{t-1}
  const auto d = s - previous_z;
  const auto zero = at::zeros({}, logits.options());
  const auto z = scan.finals[0];
  return {at::where(is_masked, zero, d.sigmoid()),
          at::where(is_masked | (previous_z <= -1e29), zero, at::log_sigmoid(-d)),
          at::where(z <= -1e29, at::full({}, -INFINITY, z.options()), z)};
}

}  // namespace

Results forward(const Call& call, bool save) {
  const auto problem = Problem::check(call);
  const auto B = call.q.size(0), T = call.q.size(1), H = call.k.size(2), D = call.q.size(3),
             V = call.v.size(3);
  const auto type = accumulate_type(call.q);
  const auto options = call.q.options().dtype(type);
  const Chunks chunks(call.q, B, T, choose_chunk_length(T), call.cu_seqlens);
  const auto N = chunks.sequences();

  OptionalTensor z;
  Tensor weights, gates;
  if (is_defined(call.g)) {
    gates = chunks.split(*call.g, type);
    weights = is_defined(call.s) ? chunks.split(*call.s, type) : -gates.expm1();
  } else {
    const auto M = call.s->size(3);
    auto abc =
        compute_abc_gates(chunks, chunks.split(*call.s, type),
                          is_defined(call.state_z) ? *call.state_z : at::full({N, H, M}, -INFINITY, options));
    weights = abc.s;
    gates = abc.g;
    z = abc.z;
  }
  const auto M = weights.size(-1);
  const auto Hk = is_defined(call.state_k) ? *call.state_k : at::zeros({N, H, D, M}, options);
  const auto Hv = is_defined(call.state_v) ? *call.state_v : at::zeros({N, H, M, V}, options);

  const ChannelDecay decay(gates);
  const auto logits = scan_value_decay(chunks, chunks.split(call.q, type) * call.query_scale(),
                                       chunks.split(call.k, type), weights, decay, Hk);
  const auto read = scan_key_decay(chunks, apply_feature(call.feature, logits.o), weights,
                                   chunks.split(call.v, type), decay, Hv);
  return {chunks.join(read.o, call.q.scalar_type()), logits.state, read.state, z,
          new_saved(problem.saved(call, save), call.q.options())};
}

GIRIH_IMPL_ATEN(m) { register_forward<&WithoutTF32<&forward>::call>(m); }

}  // namespace girih::gsa
