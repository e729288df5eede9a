#include "gated_scan.h"

#include "decay.h"

namespace girih {
namespace {

// q's heads beside the head of the memory that they read: [B, count, HQ, C, D] -> [B, count, H, HQ / H, C,
// D].
Tensor group(const Tensor& q, int64_t H) {
  return q.reshape({q.size(0), q.size(1), H, q.size(2) / H, q.size(3), q.size(4)});
}
Tensor ungroup(const Tensor& o) {
  return o.flatten(2, 3);
}

// The rows of a chunk in pairs of neighbouring blocks of h: the lower half (earlier) and the upper half
// (later).
std::pair<Tensor, Tensor> halves(const Tensor& x, int64_t h) {
  const auto C = x.size(-2);
  const auto both = x.unflatten(-2, {C / (2 * h), 2, h}).unbind(-3);
  return {both[0], both[1]};
}

// A decay per channel has no common factor for a whole chunk: e^{-L} overflows. Blocks of h rows double from
// 1 to C / 2 instead; the reference of a pair of blocks is the row between them, so every exponent is a sum
// of gates, <= 0: `to` from the block's start through each row, `after` from after each row to the block's
// end.
struct BlockSums {
  Tensor to, after;

  explicit BlockSums(const Tensor& g) : to(g), after(at::zeros_like(g)) {}

  void merge(int64_t h) {
    const auto [to_low, to_up] = halves(to, h);
    const auto [after_low, after_up] = halves(after, h);
    const auto sum_low = to_low.narrow(-2, h - 1, 1), sum_up = to_up.narrow(-2, h - 1, 1);
    const auto dim = to.dim() - 2;
    to = at::stack({to_low, to_up + sum_low}, -3).flatten(dim, dim + 2);
    after = at::stack({after_low + sum_up, after_up}, -3).flatten(dim, dim + 2);
  }
};

// o + x in the upper half of every pair of blocks
Tensor add_to_upper(const Tensor& o, const Tensor& x, int64_t h) {
  const auto [low, up] = halves(o, h);
  const auto dim = o.dim() - 2;
  return at::stack({low, up + x}, -3).flatten(dim, dim + 2);
}

// S <- decay S + U over the chunks; decay [B, count, H, ...] broadcasts against U [B, count, H, D, V].
Chunks::Scan scan_states(const Chunks& chunks, const Tensor& decay, const Tensor& U, const Tensor& S0) {
  const auto update = U.unbind(1);
  const auto keep = decay.defined() ? decay.unbind(1) : std::vector<Tensor>();
  return chunks.scan({S0}, [&](int64_t c, const Chunks::States& S) -> Chunks::States {
    return {keep.empty() ? S[0] + update[c] : at::addcmul(update[c], keep[c], S[0])};
  });
}

}  // namespace

int64_t exact_chunk(int64_t T) {
  int64_t C = 1;
  while (C < T && C < 64) C *= 2;
  return C;
}

Scanned scan_key_decay(const Chunks& chunks, const Tensor& q_heads, const Tensor& k, const Tensor& v,
                       const Tensor& g, const Tensor& S0) {
  const auto C = chunks.length();
  const auto q = group(q_heads, k.size(2));
  const auto k_ = k.unsqueeze(3), v_ = v.unsqueeze(3);  // one for all query heads of the group
  Tensor o, q_in = q, k_out = k, keep;
  if (!g.defined() || g.dim() == 4) {
    // O = ((Q K^T) * e^{L_t - L_i}) V
    auto A = q.matmul(k_.transpose(-1, -2));
    if (g.defined()) {
      A = A * decay_matrix(g).unsqueeze(3);
      q_in = q * sum_to(g, -1).exp().unsqueeze(3).unsqueeze(-1);
      k_out = k * sum_after(g, -1).exp().unsqueeze(-1);
      keep = g.sum(-1).exp().unsqueeze(-1).unsqueeze(-1);
    } else {
      A = A.tril();
    }
    o = A.matmul(v_);
  } else {
    // a row's own token: no decay
    o = (q * k_).sum(-1, true) * v_;
    BlockSums L(g);
    for (int64_t h = 1; h < C; h *= 2) {
      const auto [v_low, v_up] = halves(v_, h);
      const auto k_low = halves(k * L.after.exp(), h).first.unsqueeze(3);
      const auto q_up = halves(q * L.to.exp().unsqueeze(3), h).second;
      o = add_to_upper(o, q_up.matmul(k_low.transpose(-1, -2)).matmul(v_low), h);
      L.merge(h);
    }
    q_in = q * L.to.exp().unsqueeze(3);
    k_out = k * L.after.exp();
    keep = L.to.select(-2, C - 1).exp().unsqueeze(-1);
  }
  // S <- Diag(e^{L_C}) S + (K * e^{L_C - L})^T V,    O += (Q * e^{L}) S
  const auto scan = scan_states(chunks, keep, k_out.transpose(-1, -2).matmul(v), S0);
  o = o + q_in.matmul(chunks.starts(scan, 0).unsqueeze(3));
  return {ungroup(o), scan.finals[0]};
}

Scanned scan_value_decay(const Chunks& chunks, const Tensor& q_heads, const Tensor& k, const Tensor& v,
                         const Tensor& g, const Tensor& S0) {
  const auto C = chunks.length();
  const auto q = group(q_heads, k.size(2));
  const auto k_ = k.unsqueeze(3), v_ = v.unsqueeze(3);
  auto o = (q * k_).sum(-1, true) * v_;
  BlockSums L(g);
  for (int64_t h = 1; h < C; h *= 2) {
    const auto q_up = halves(q, h).second, k_low = halves(k_, h).first;
    const auto v_low = halves(v * L.after.exp(), h).first.unsqueeze(3);
    const auto to_up = halves(L.to.exp(), h).second.unsqueeze(3);
    o = add_to_upper(o, q_up.matmul(k_low.transpose(-1, -2)).matmul(v_low) * to_up, h);
    L.merge(h);
  }
  // S <- S Diag(e^{L_C}) + K^T (V * e^{L_C - L}),    O += (Q S) * e^{L}
  const auto keep = L.to.select(-2, C - 1).exp().unsqueeze(-2);
  const auto scan = scan_states(chunks, keep, k.transpose(-1, -2).matmul(v * L.after.exp()), S0);
  o = o + q.matmul(chunks.starts(scan, 0).unsqueeze(3)) * L.to.exp().unsqueeze(3);
  return {ungroup(o), scan.finals[0]};
}

}  // namespace girih
