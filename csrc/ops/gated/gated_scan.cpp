// Linear attention with decays in chunk form, by matrix products over blocks of rows.
#include "gated_scan.h"

#include "../chunks/decay.h"

namespace girih {
namespace {

// Groups the heads of q by the head of the memory that they read: [B, count, HQ, C, D] -> [B, count, H, HQ /
// H, C, D].
Tensor group(const Tensor& q, int64_t H) {
  return q.reshape({q.size(0), q.size(1), H, q.size(2) / H, q.size(3), q.size(4)});
}

// Splits the rows of a chunk into pairs of blocks of h rows: the lower (earlier) and the upper (later)
// blocks.
std::pair<Tensor, Tensor> halves(const Tensor& x, int64_t h) {
  const auto C = x.size(-2);
  const auto both = x.unflatten(-2, {C / (2 * h), 2, h}).unbind(-3);
  return {both[0], both[1]};
}

// Adds x to the upper block of every pair.
Tensor add_to_upper(const Tensor& o, const Tensor& x, int64_t h) {
  const auto [low, up] = halves(o, h);
  const auto dim = o.dim() - 2;
  return at::stack({low, up + x}, -3).flatten(dim, dim + 2);
}

// S <- decay S + U over the chunks, O += read(S before the chunk)
Scanned scan_chunks(const Chunks& chunks, const Tensor& q, const Tensor& decay, const Tensor& U,
                    const Tensor& S0, const std::function<Tensor(const Tensor&)>& output) {
  const auto update = U.unbind(1);
  const auto keep = decay.defined() ? decay.unbind(1) : std::vector<Tensor>();
  const auto scan = chunks.scan({S0}, [&](int64_t c, const Chunks::States& S) -> Chunks::States {
    return {keep.empty() ? S[0] + update[c] : at::addcmul(update[c], keep[c], S[0])};
  });
  return {output(q.matmul(chunks.starts(scan, 0).unsqueeze(3))).flatten(2, 3), scan.finals[0]};
}

}  // namespace

int64_t exact_chunk(int64_t T) {
  int64_t C = 1;
  while (C < T && C < 64) C *= 2;
  return C;
}

ChannelDecay::ChannelDecay(const Tensor& g) {
  const auto C = g.size(-2), dim = g.dim() - 2;
  auto sum_to = g, sum_after = at::zeros_like(g);  // within blocks of h rows
  for (int64_t h = 1; h < C; h *= 2) {
    const auto [to_low, to_up] = halves(sum_to, h);
    const auto [after_low, after_up] = halves(sum_after, h);
    levels.push_back({h, to_up.exp(), after_low.exp()});
    const auto low = to_low.narrow(-2, h - 1, 1), up = to_up.narrow(-2, h - 1, 1);
    sum_to = at::stack({to_low, to_up + low}, -3).flatten(dim, dim + 2);
    sum_after = at::stack({after_low + up, after_up}, -3).flatten(dim, dim + 2);
  }
  to = sum_to.exp();
  after = sum_after.exp();
  whole = to.select(-2, C - 1);
}

Scanned scan_head_decay(const Chunks& chunks, const Tensor& q_heads, const Tensor& k, const Tensor& v,
                        const Tensor& g, const Tensor& S0) {
  const auto q = group(q_heads, k.size(2));
  // O = ((Q K^T) * e^{L_t - L_i}) V + (Q * e^{L}) S,    S <- e^{L_C} S + (K * e^{L_C - L})^T V
  const auto scores = q.matmul(k.unsqueeze(3).transpose(-1, -2));
  const auto A = g.defined() ? scores * decay_matrix(g).unsqueeze(3) : scores.tril();
  const auto q_in = g.defined() ? q * g.cumsum(-1).exp().unsqueeze(3).unsqueeze(-1) : q;
  const auto k_out = g.defined() ? k * sum_after(g, -1).exp().unsqueeze(-1) : k;
  const auto decay = g.defined() ? g.sum(-1).exp().unsqueeze(-1).unsqueeze(-1) : Tensor();
  const auto o = A.matmul(v.unsqueeze(3));
  return scan_chunks(chunks, q_in, decay, k_out.transpose(-1, -2).matmul(v), S0,
                     [&](const Tensor& carried) { return o + carried; });
}

Scanned scan_key_decay(const Chunks& chunks, const Tensor& q_heads, const Tensor& k, const Tensor& v,
                       const ChannelDecay& decay, const Tensor& S0) {
  const auto q = group(q_heads, k.size(2));
  auto o = (q * k.unsqueeze(3)).sum(-1, true) * v.unsqueeze(3);  // the token of the row itself has no decay
  for (const auto& [h, to_up, after_low] : decay.levels) {
    // O_up += ((Q_up * e^{to_up}) (K_low * e^{after_low})^T) V_low
    const auto q_up = halves(q, h).second * to_up.unsqueeze(3);
    const auto k_low = (halves(k, h).first * after_low).unsqueeze(3);
    const auto v_low = halves(v, h).first.unsqueeze(3);
    o = add_to_upper(o, q_up.matmul(k_low.transpose(-1, -2)).matmul(v_low), h);
  }
  // O += (Q * e^{L}) S,    S <- Diag(e^{L_C}) S + (K * e^{L_C - L})^T V
  return scan_chunks(chunks, q * decay.to.unsqueeze(3), decay.whole.unsqueeze(-1),
                     (k * decay.after).transpose(-1, -2).matmul(v), S0,
                     [&](const Tensor& carried) { return o + carried; });
}

Scanned scan_value_decay(const Chunks& chunks, const Tensor& q_heads, const Tensor& k, const Tensor& v,
                         const ChannelDecay& decay, const Tensor& S0) {
  const auto q = group(q_heads, k.size(2));
  auto o = (q * k.unsqueeze(3)).sum(-1, true) * v.unsqueeze(3);
  for (const auto& [h, to_up, after_low] : decay.levels) {
    // O_up += ((Q_up K_low^T) (V_low * e^{after_low})) * e^{to_up}
    const auto q_up = halves(q, h).second;
    const auto k_low = halves(k, h).first.unsqueeze(3);
    const auto v_low = (halves(v, h).first * after_low).unsqueeze(3);
    o = add_to_upper(o, q_up.matmul(k_low.transpose(-1, -2)).matmul(v_low) * to_up.unsqueeze(3), h);
  }
  // O += (Q S) * e^{L},    S <- S Diag(e^{L_C}) + K^T (V * e^{L_C - L})
  return scan_chunks(chunks, q, decay.whole.unsqueeze(-2), k.transpose(-1, -2).matmul(v * decay.after), S0,
                     [&](const Tensor& carried) { return at::addcmul(o, carried, decay.to.unsqueeze(3)); });
}

}  // namespace girih
