// CUDA implementation of cat_attention. float64 and wider heads: the ATen form.
#include "../arguments/kernel_arguments.h"
#include "../registration/dispatch.h"
#include "aten.h"
#include "cat_attention/cat_attention.h"
#include "problem.h"

namespace girih::cat_attention {
namespace {

static_assert(kWidest == kernels::kCatWidest && kWidestFloat == kernels::kCatWidestFloat);

// The path of the problem, restricted by the shared memory of the device.
Path path_of(const Problem& problem, const Tensor& q) {
  const auto path = problem.path(q);
  if (path != Path::Code::tensor_cores) return path;
  bool fits = false;
  check_launch("cat_fits",
               kernels::cat_fits(static_cast<int>(problem.D.expect_int()),
                                 static_cast<int>(problem.V.expect_int()), kernel_dtype(q), fits));
  return fits ? path : aten(kSmallCard);
}

// The tensors of one call as the kernels read them: rows aligned to 16 bytes.
struct Arguments {
  Tensor q, k, v, cu_chunks;
  kernels::CatShape shape;

  Arguments(const Tensor& q_, const Tensor& k_, const Tensor& v_, const OptionalTensor& cu, int64_t chunk,
            std::optional<double> scale)
      : q(in_packs(q_)), k(in_packs(k_)), v(in_packs(v_)) {
    if (given(cu)) cu_chunks = cu->contiguous();
    shape.chunks = kernel_tokens(q, cu_chunks);
    shape.rows = static_cast<int>(q.size(1)), shape.size = static_cast<int>(chunk);
    shape.chunks.tokens = (q.size(1) + chunk - 1) / chunk;
    shape.heads = static_cast<int>(k.size(2)), shape.query_heads = static_cast<int>(q.size(2));
    shape.D = static_cast<int>(q.size(3)), shape.V = static_cast<int>(v.size(3));
    shape.scale = static_cast<float>(scale.value_or(1 / std::sqrt(double(q_.size(3)))));
    shape.dtype = kernel_dtype(q);
  }

  // Allocates [B, T, heads, width] for the kernels to write.
  Tensor rows_of(const Tensor& x) const { return at::empty(x.sizes(), x.options()); }

  template <class Problem>
  void fill(Problem& p) const {
    p.shape = shape;
    p.q = input<4>(q), p.k = input<4>(k), p.v = input<4>(v);
  }
};

std::tuple<Tensor, Tensor> forward_cuda(const Tensor& q, const Tensor& k, const Tensor& v,
                                        const OptionalTensor& cu_chunks, int64_t chunk,
                                        std::optional<double> scale, bool save) {
  const auto problem = Problem::check(q, k, v, cu_chunks, chunk, scale);
  const c10::cuda::CUDAGuard device(q.device());
  if (path_of(problem, q) == Path::Code::aten) {
    at::NoTF32Guard exact;
    return forward(q, k, v, cu_chunks, chunk, scale, save);
  }
  const Arguments args(q, k, v, cu_chunks, chunk, scale);
  const auto B = q.size(0), T = q.size(1), HQ = q.size(2);
  const auto o = at::empty({B, T, HQ, args.v.size(3)}, q.options());
  const auto numbers = q.options().dtype(at::kFloat);
  const auto lse = save ? at::empty({B, T, HQ}, numbers) : at::empty({0}, numbers);
  kernels::CatForward p;
  args.fill(p);
  p.o = output<4>(o);
  if (save) p.lse = output<3>(lse);
  check_launch("cat_forward", kernels::cat_forward(p, c10::cuda::getCurrentCUDAStream()));
  return {without_packs(o, v.size(3)), lse};
}

Gradients backward_cuda(const OptionalTensor& grad_o, const Tensor& q, const Tensor& k, const Tensor& v,
                        const OptionalTensor& cu_chunks, const Tensor& lse, const Tensor& o, int64_t chunk,
                        std::optional<double> scale) {
  const auto problem = Problem::check(q, k, v, cu_chunks, chunk, scale);
  const c10::cuda::CUDAGuard device(q.device());
  if (!given(grad_o) || path_of(problem, q) == Path::Code::aten) {
    at::NoTF32Guard exact;
    return backward(grad_o, q, k, v, cu_chunks, lse, o, chunk, scale);
  }
  const auto B = q.size(0), T = q.size(1), HQ = q.size(2);
  check_kept("cat_attention", "lse", lse, {B, T, HQ}, at::kFloat);
  check_kept("cat_attention", "o", o, {B, T, HQ, v.size(3)}, q.scalar_type());
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const Arguments args(q, k, v, cu_chunks, chunk, scale);
  const auto dout = in_packs(grad_o->to(q.scalar_type())), out = in_packs(o);
  const auto numbers = q.options().dtype(at::kFloat);
  const auto queries = at::empty({B, HQ, T, int64_t(sizeof(kernels::CatQuery) / sizeof(float))}, numbers);
  auto* const of_queries = static_cast<kernels::CatQuery*>(queries.mutable_data_ptr());

  const auto partials = at::empty({kernels::cat_partials(args.shape)}, numbers);
  const auto dq = args.rows_of(args.q), dk = args.rows_of(args.k), dv = args.rows_of(args.v);
  kernels::CatQueryGradients rows;
  args.fill(rows);
  rows.o = input<4>(out), rows.dout = input<4>(dout), rows.lse = input<3>(lse);
  rows.dq = output<4>(dq), rows.queries = of_queries;
  rows.dk = output<4>(dk), rows.dv = output<4>(dv), rows.partials = partials.mutable_data_ptr<float>();
  check_launch("cat_query_gradients", kernels::cat_query_gradients(rows, stream));

  kernels::CatHeaderGradients headers;
  args.fill(headers);
  headers.dout = input<4>(dout), headers.queries = of_queries;
  headers.partials = rows.partials;
  check_launch("cat_header_gradients", kernels::cat_header_gradients(headers, stream));

  kernels::CatOwnGradients own;
  args.fill(own);
  own.dout = input<4>(dout), own.queries = of_queries, own.partials = rows.partials;
  own.dk = output<4>(dk), own.dv = output<4>(dv);
  check_launch("cat_own_gradients", kernels::cat_own_gradients(own, stream));
  return {without_packs(dq, q.size(3)), without_packs(dk, k.size(3)), without_packs(dv, v.size(3)),
          std::nullopt};
}

Explanation explain(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& cu_chunks,
                    int64_t chunk, std::optional<double> scale, std::string_view device, bool) {
  const auto problem = Problem::check(q, k, v, cu_chunks, chunk, scale);
  const c10::cuda::CUDAGuard guard(q.device());
  return explained(path_of(problem, q), device);
}

}  // namespace

TORCH_LIBRARY_IMPL(girih, CUDA, m) {
  m.impl("cat_attention_explain", &explain);
  m.impl("cat_attention_forward", &forward_cuda);
  m.impl("cat_attention_backward", &backward_cuda);
}

}  // namespace girih::cat_attention
