// Attention of CAT. Row 0 of every chunk of C rows is its header. A row of chunk c attends to the headers of
// the chunks before c, and to the rows of chunk c up to itself, the header of chunk c included:
//   a_j = scale q . k_j        o = sum_j e^{a_j - lse} v_j        lse = log sum_j e^{a_j}
// A block of a few chunks is computed against all headers up to it: about T (K + C) / 2 scores are computed,
// and those of one block exist at a time. Backward computes the scores again and p from lse:
//   p_j = e^{a_j - lse}        da_j = p_j (do . v_j - sum_i p_i do . v_i)
//   dq = scale sum_j da_j k_j        dk_j = scale sum da_j q        dv_j = sum p_j do
#include "../registration/dispatch.h"
#include "aten.h"
#include "problem.h"

namespace girih::cat_attention {
namespace {

// Rows of a block. Fewer rows mean smaller products, more rows mean more scores of masked headers: on 2 CPU
// cores 256 to 512 were fastest from T = 512 to T = 8192.
constexpr int64_t kRows = 512;

// Scores of the rows of n chunks with the rows of their own chunk, and with headers.
struct Scores {
  Tensor own;      // [B, H, n, G C, C]
  Tensor headers;  // [B, H, n, G C, headers]
};

// q, k and v with heads first, in chunks, the last chunk zero-padded. The rows of the G query heads that
// share a head of k and v form one matrix.
class Attention {
 public:
  Attention(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& cu_chunks, int64_t chunk,
            std::optional<double> scale)
      : scale(scale.value_or(1 / std::sqrt(double(q.size(3))))),
        B(q.size(0)),
        T(q.size(1)),
        H(k.size(2)),
        G(q.size(2) / H),
        C(chunk),
        K((T + C - 1) / C),
        type(accumulate_type(q)),
        q(split(q) * this->scale),
        k(split(k)),
        v(split(v)),
        header_k(this->k.select(3, 0).contiguous()),
        header_v(this->v.select(3, 0).contiguous()) {
    later_ = at::ones({C, C}, q.options().dtype(at::kBool)).triu(1);
    if (!given(cu_chunks)) return;
    const auto cuts = cu_chunks->to(at::kLong).contiguous();
    const auto after = at::searchsorted(cuts, at::arange(K, cuts.options()), false, /*right=*/true);
    first_ = cuts.index_select(0, (after - 1).clamp_min(0));
    outside = (after == 0) | (after == cuts.size(0));
  }

  // [B, T, G H, X] -> [B, H, K, G C, X]; G = 1 for k and v
  Tensor split(const Tensor& x) const {
    const auto group = x.size(2) / H, X = x.size(3);
    return at::constant_pad_nd(x.to(type), {0, 0, 0, 0, 0, K * C - T})
        .reshape({B, K, C, H, group, X})
        .permute({0, 3, 1, 4, 2, 5})
        .reshape({B, H, K, group * C, X});
  }

  // [B, H, K, G C, X] -> [B, T, G H, X], contiguous
  Tensor join(const Tensor& x, at::ScalarType dtype) const {
    const auto group = x.size(3) / C, X = x.size(4);
    return x.view({B, H, K, group, C, X})
        .permute({0, 2, 4, 1, 3, 5})
        .reshape({B, K * C, H * group, X})
        .narrow(1, 0, T)
        .to(dtype)
        .contiguous();
  }

  // Calls body(c, n) for each block: its first chunk and its number of chunks.
  template <typename Body>
  void for_blocks(Body body) const {
    const auto block = std::max<int64_t>(1, kRows / C);
    for (int64_t c = 0; c < K; c += block) body(c, std::min(block, K - c));
  }

  // Chunks c to c + n - 1 of [B, H, K, ...].
  static Tensor take(const Tensor& x, int64_t c, int64_t n) { return x.narrow(2, c, n); }

  // [B, H, n, G C, X] with [B, H, headers, Y] -> [B, H, n, G C, ...]: x y^T, or x y with `transposed` false.
  static Tensor with_headers(const Tensor& x, const Tensor& y, bool transposed) {
    auto sizes = x.sizes().vec();
    sizes.back() = transposed ? y.size(2) : y.size(3);
    return x.flatten(2, 3).matmul(transposed ? y.mT() : y).view(sizes);
  }

  // Scores of chunks c to c + n - 1; -inf at masked positions.
  Scores scores(int64_t c, int64_t n) const {
    const double never = -std::numeric_limits<double>::infinity();
    const auto rows = take(q, c, n), all = take(header_k, 0, c + n);
    Scores s{rows.matmul(take(k, c, n).mT()), with_headers(rows, all, true)};
    s.own.view({B, H, n, G, C, C}).masked_fill_(later_, never);
    // Headers before c are masked only if they belong to another sequence.
    const auto from = first_.defined() ? 0 : c;
    const auto index = q.options().dtype(at::kLong);
    const auto header = at::arange(from, c + n, index);
    auto hidden = header >= at::arange(c, c + n, index).unsqueeze(1);
    if (first_.defined()) hidden = hidden | (header < first_.narrow(0, c, n).unsqueeze(1));
    s.headers.narrow(4, from, c + n - from).masked_fill_(hidden.unsqueeze(1), never);
    return s;
  }

  double scale;
  int64_t B, T, H, G, C, K;
  at::ScalarType type;
  Tensor q, k, v;             // [B, H, K, G C | C, D | V], q times scale
  Tensor header_k, header_v;  // [B, H, K, D | V]
  Tensor outside;             // [K]: the chunk belongs to no sequence; defined if packed

 private:
  Tensor later_;  // [C, C]: the key follows the query
  Tensor first_;  // [K]: the first chunk of the sequence of the chunk; defined if packed
};

}  // namespace

std::tuple<Tensor, Tensor> forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                   const OptionalTensor& cu_chunks, int64_t chunk,
                                   std::optional<double> scale, bool save) {
  Problem::check(q, k, v, cu_chunks, chunk, scale);
  const Attention x(q, k, v, cu_chunks, chunk, scale);
  auto sizes = x.q.sizes().vec();
  sizes.back() = v.size(3);
  const auto o = at::empty(sizes, x.q.options());
  sizes.back() = 1;
  const auto lse = at::empty(sizes, x.q.options());
  x.for_blocks([&](int64_t c, int64_t n) {
    const auto s = x.scores(c, n);
    const auto largest = at::maximum(s.own.amax(-1, true), s.headers.amax(-1, true));
    const auto own = s.own.sub_(largest).exp_(), headers = s.headers.sub_(largest).exp_();
    const auto sum = own.sum(-1, true) + headers.sum(-1, true);
    const auto read =
        own.matmul(x.take(x.v, c, n)).add_(x.with_headers(headers, x.take(x.header_v, 0, c + n), false));
    x.take(o, c, n).copy_(read.div_(sum));
    x.take(lse, c, n).copy_(sum.log().add_(largest));
  });
  if (x.outside.defined()) {
    const auto outside = x.outside.view({x.K, 1, 1});
    o.masked_fill_(outside, 0);
    lse.masked_fill_(outside, std::numeric_limits<double>::infinity());  // p = 0
  }
  return {x.join(o, q.scalar_type()), save ? x.join(lse, x.type).squeeze(-1) : at::empty({0}, lse.options())};
}

Gradients backward(const OptionalTensor& grad_o, const Tensor& q, const Tensor& k, const Tensor& v,
                   const OptionalTensor& cu_chunks, const Tensor& lse, const Tensor&, int64_t chunk,
                   std::optional<double> scale) {
  Problem::check(q, k, v, cu_chunks, chunk, scale);
  if (!given(grad_o)) return {at::zeros_like(q), at::zeros_like(k), at::zeros_like(v), std::nullopt};
  const Attention x(q, k, v, cu_chunks, chunk, scale);
  const auto grad = x.split(*grad_o), norms = x.split(lse.unsqueeze(-1));
  const auto dq = at::empty_like(x.q), dk = at::empty_like(x.k), dv = at::empty_like(x.v);
  const auto dheader_k = at::zeros_like(x.header_k), dheader_v = at::zeros_like(x.header_v);
  x.for_blocks([&](int64_t c, int64_t n) {
    const auto header_k = x.take(x.header_k, 0, c + n), header_v = x.take(x.header_v, 0, c + n);
    const auto rows = x.take(x.q, c, n), down = x.take(grad, c, n), norm = x.take(norms, c, n);
    const auto s = x.scores(c, n);
    // p
    const auto own = s.own.sub_(norm).exp_(), headers = s.headers.sub_(norm).exp_();
    x.take(dv, c, n).copy_(own.mT().matmul(down));
    x.take(dheader_v, 0, c + n).add_(headers.flatten(2, 3).mT().matmul(down.flatten(2, 3)));
    // da
    const auto down_own = down.matmul(x.take(x.v, c, n).mT()),
               down_headers = x.with_headers(down, header_v, true);
    const auto mean = (own * down_own).sum(-1, true) + (headers * down_headers).sum(-1, true);
    const auto d_own = down_own.sub_(mean).mul_(own), d_headers = down_headers.sub_(mean).mul_(headers);
    x.take(dq, c, n).copy_(d_own.matmul(x.take(x.k, c, n)).add_(x.with_headers(d_headers, header_k, false)));
    x.take(dk, c, n).copy_(d_own.mT().matmul(rows));
    x.take(dheader_k, 0, c + n).add_(d_headers.flatten(2, 3).mT().matmul(rows.flatten(2, 3)));
  });
  dk.select(3, 0).add_(dheader_k);
  dv.select(3, 0).add_(dheader_v);
  return {x.join(dq.mul_(x.scale), q.scalar_type()), x.join(dk, k.scalar_type()), x.join(dv, v.scalar_type()),
          std::nullopt};
}

TORCH_LIBRARY_IMPL(girih, CPU, m) {
  m.impl("cat_attention_forward", &forward);
  m.impl("cat_attention_backward", &backward);
}
#ifndef GIRIH_WITH_CUDA  // with it, cuda.cpp serves CUDA tensors
TORCH_LIBRARY_IMPL(girih, CUDA, m) {
  m.impl("cat_attention_forward", TORCH_FN(InFullPrecision<&forward>::call));
  m.impl("cat_attention_backward", TORCH_FN(InFullPrecision<&backward>::call));
}
#endif

}  // namespace girih::cat_attention
