// Attention of CAT. Row 0 of every chunk of C rows is its header. A row of chunk c attends to the headers of
// the chunks before c, and to the rows of chunk c up to itself, the header of chunk c included:
//   a_j = scale q . k_j        o = sum_j e^{a_j - lse} v_j        lse = log sum_j e^{a_j}
// A block of a few chunks is computed against all headers up to it: about T (K + C) / 2 scores are computed,
// and those of one block exist at a time. Backward computes the scores again and p from lse:
//   p_j = e^{a_j - lse}        da_j = p_j (do . v_j - sum_i p_i do . v_i)
//   dq = scale sum_j da_j k_j        dk_j = scale sum da_j q        dv_j = sum p_j do
#include "aten.h"

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
  explicit Attention(const Call& call)
      : scale(call.query_scale()),
        B(call.q.size(0)),
        T(call.q.size(1)),
        H(call.k.size(2)),
        G(call.q.size(2) / H),
        C(call.chunk),
        K((T + C - 1) / C),
        type(accumulate_type(call.q)),
        q(split(call.q) * scale),
        k(split(call.k)),
        v(split(call.v)),
        header_k(k.select(3, 0).contiguous()),
        header_v(v.select(3, 0).contiguous()) {
    is_later_ = at::ones({C, C}, call.q.options().dtype(at::kBool)).triu(1);
    if (!is_defined(call.cu_chunks)) return;
    const auto cuts = call.cu_chunks->to(at::kLong).contiguous();
    const auto sequence_end = at::searchsorted(cuts, at::arange(K, cuts.options()), false, /*right=*/true);
    first_chunk_ = cuts.index_select(0, (sequence_end - 1).clamp_min(0));
    is_outside = (sequence_end == 0) | (sequence_end == cuts.size(0));
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
  static Tensor select_chunks(const Tensor& x, int64_t c, int64_t n) { return x.narrow(2, c, n); }

  // [B, H, n, G C, X] with [B, H, headers, Y] -> [B, H, n, G C, ...]: x y^T, or x y with `transposed` false.
  static Tensor multiply_headers(const Tensor& x, const Tensor& y, bool transposed) {
    auto sizes = x.sizes().vec();
    sizes.back() = transposed ? y.size(2) : y.size(3);
    return x.flatten(2, 3).matmul(transposed ? y.mT() : y).view(sizes);
  }

  // Scores of chunks c to c + n - 1; -inf at masked positions.
  Scores scores(int64_t c, int64_t n) const {
    const double negative_infinity = -std::numeric_limits<double>::infinity();
    const auto rows = select_chunks(q, c, n), all = select_chunks(header_k, 0, c + n);
    Scores s{rows.matmul(select_chunks(k, c, n).mT()), multiply_headers(rows, all, true)};
    s.own.view({B, H, n, G, C, C}).masked_fill_(is_later_, negative_infinity);
    // Headers before c are masked only if they belong to another sequence.
    const auto from = first_chunk_.defined() ? 0 : c;
    const auto index = q.options().dtype(at::kLong);
    const auto header = at::arange(from, c + n, index);
    auto hidden = header >= at::arange(c, c + n, index).unsqueeze(1);
    if (first_chunk_.defined()) hidden = hidden | (header < first_chunk_.narrow(0, c, n).unsqueeze(1));
    s.headers.narrow(4, from, c + n - from).masked_fill_(hidden.unsqueeze(1), negative_infinity);
    return s;
  }

  double scale;
  int64_t B, T, H, G, C, K;
  at::ScalarType type;
  Tensor q, k, v;             // [B, H, K, G C | C, D | V], q times scale
  Tensor header_k, header_v;  // [B, H, K, D | V]
  Tensor is_outside;          // [K]: the chunk belongs to no sequence; defined if packed

 private:
  Tensor is_later_;     // [C, C]: the key follows the query
  Tensor first_chunk_;  // [K]: the first chunk of the sequence of the chunk; defined if packed
};

}  // namespace

Results forward(const Call& call, bool save) {
  Problem::check(call);
  const Attention x(call);
  auto sizes = x.q.sizes().vec();
  sizes.back() = call.v.size(3);
  const auto o = at::empty(sizes, x.q.options());
  sizes.back() = 1;
  const auto lse = at::empty(sizes, x.q.options());
  x.for_blocks([&](int64_t c, int64_t n) {
    const auto s = x.scores(c, n);
    const auto largest = at::maximum(s.own.amax(-1, true), s.headers.amax(-1, true));
    const auto own = s.own.sub_(largest).exp_(), headers = s.headers.sub_(largest).exp_();
    const auto sum = own.sum(-1, true) + headers.sum(-1, true);
    const auto read = own.matmul(x.select_chunks(x.v, c, n))
                          .add_(x.multiply_headers(headers, x.select_chunks(x.header_v, 0, c + n), false));
    x.select_chunks(o, c, n).copy_(read.div_(sum));
    x.select_chunks(lse, c, n).copy_(sum.log().add_(largest));
  });
  if (x.is_outside.defined()) {
    const auto is_outside = x.is_outside.view({x.K, 1, 1});
    o.masked_fill_(is_outside, 0);
    lse.masked_fill_(is_outside, std::numeric_limits<double>::infinity());  // p = 0
  }
  return {x.join(o, call.q.scalar_type()),
          save ? x.join(lse, x.type).squeeze(-1) : at::empty({0}, lse.options())};
}

std::optional<Gradients> backward(const Call& call, const OutputGradients& grads, const SavedTensors& saved) {
  Problem::check(call);
  const auto &q = call.q, &k = call.k, &v = call.v;
  if (!is_defined(grads.o))
    return Gradients{at::zeros_like(q), at::zeros_like(k), at::zeros_like(v), std::nullopt};
  const Attention x(call);
  const auto grad = x.split(*grads.o), norms = x.split(saved.lse.unsqueeze(-1));
  const auto dq = at::empty_like(x.q), dk = at::empty_like(x.k), dv = at::empty_like(x.v);
  const auto dheader_k = at::zeros_like(x.header_k), dheader_v = at::zeros_like(x.header_v);
  x.for_blocks([&](int64_t c, int64_t n) {
    const auto header_k = x.select_chunks(x.header_k, 0, c + n),
               header_v = x.select_chunks(x.header_v, 0, c + n);
    const auto rows = x.select_chunks(x.q, c, n), dout = x.select_chunks(grad, c, n),
               norm = x.select_chunks(norms, c, n);
    const auto s = x.scores(c, n);
    // p
    const auto own = s.own.sub_(norm).exp_(), headers = s.headers.sub_(norm).exp_();
    x.select_chunks(dv, c, n).copy_(own.mT().matmul(dout));
    x.select_chunks(dheader_v, 0, c + n).add_(headers.flatten(2, 3).mT().matmul(dout.flatten(2, 3)));
    // da
    const auto dp_own = dout.matmul(x.select_chunks(x.v, c, n).mT()),
               dp_headers = x.multiply_headers(dout, header_v, true);
    const auto mean = (own * dp_own).sum(-1, true) + (headers * dp_headers).sum(-1, true);
    const auto d_own = dp_own.sub_(mean).mul_(own), d_headers = dp_headers.sub_(mean).mul_(headers);
    x.select_chunks(dq, c, n).copy_(
        d_own.matmul(x.select_chunks(x.k, c, n)).add_(x.multiply_headers(d_headers, header_k, false)));
    x.select_chunks(dk, c, n).copy_(d_own.mT().matmul(rows));
    x.select_chunks(dheader_k, 0, c + n).add_(d_headers.flatten(2, 3).mT().matmul(rows.flatten(2, 3)));
  });
  dk.select(3, 0).add_(dheader_k);
  dv.select(3, 0).add_(dheader_v);
  return Gradients{x.join(dq.mul_(x.scale), q.scalar_type()), x.join(dk, k.scalar_type()),
                   x.join(dv, v.scalar_type()), std::nullopt};
}

GIRIH_IMPL_ATEN(m) {
  register_forward<&WithoutTF32<&forward>::call>(m);
  register_backward<&WithoutTF32<&backward>::call>(m);
}

}  // namespace girih::cat_attention
