// CUDA implementation of cat_attention. float64 and wider heads: the ATen form.
#include "../arguments/kernel_arguments.h"
#include "aten.h"
#include "cat_attention/cat_attention.h"

namespace girih::cat_attention {
namespace {

static_assert(kMaxWidth == kernels::kCatMaxWidth && kMaxFloatWidth == kernels::kCatMaxWidthFp32);

Path choose_path(const Problem& problem, const Call& call) {
  const auto path = problem.path(call);
  if (path != Path::Code::tensor_cores) return path;
  const c10::cuda::CUDAGuard guard(call.q.device());
  bool fits = false;
  GIRIH_QUERY(cat_fits, static_cast<int>(call.q.size(3)), static_cast<int>(call.v.size(3)),
              kernel_dtype(call.q), fits);
  return fits ? path : aten(kSharedMemoryTooSmall);
}

// The tensors of one call as the kernels read them: rows aligned to 16 bytes.
struct Arguments {
  Tensor q, k, v, cu_chunks;
  kernels::CatShape shape;

  explicit Arguments(const Call& call)
      : q(align_rows(call.q)),
        k(align_rows(call.k)),
        v(align_rows(call.v)),
        cu_chunks(contiguous_or_undefined(call.cu_chunks)) {
    const auto chunk = call.chunk;
    shape.chunks = sequence_layout(q, cu_chunks);
    shape.rows = static_cast<int>(q.size(1)), shape.size = static_cast<int>(chunk);
    shape.chunks.tokens = (q.size(1) + chunk - 1) / chunk;
    shape.heads = static_cast<int>(k.size(2)), shape.query_heads = static_cast<int>(q.size(2));
    shape.D = static_cast<int>(q.size(3)), shape.V = static_cast<int>(v.size(3));
    shape.scale = static_cast<float>(call.query_scale());
    shape.dtype = kernel_dtype(q);
  }

  Tensor empty_like_rows(const Tensor& x) const { return at::empty(x.sizes(), x.options()); }

  template <class KernelArguments>
  void fill(KernelArguments& p) const {
    p.shape = shape;
    p.q = input<4>(q), p.k = input<4>(k), p.v = input<4>(v);
  }
};

Results forward_cuda(const Call& call, bool save) {
  const auto problem = Problem::check(call);
  const c10::cuda::CUDAGuard device(call.q.device());
  if (choose_path(problem, call) == Path::Code::aten) return WithoutTF32<&forward>::call(call, save);
  const Arguments args(call);
  const auto B = call.q.size(0), T = call.q.size(1), HQ = call.q.size(2);
  const auto o = at::empty({B, T, HQ, args.v.size(3)}, call.q.options());
  const auto fp32_options = call.q.options().dtype(at::kFloat);
  const auto lse = save ? at::empty({B, T, HQ}, fp32_options) : at::empty({0}, fp32_options);
  kernels::CatForward p;
  args.fill(p);
  p.o = output<4>(o);
  if (save) p.lse = output<3>(lse);
  GIRIH_LAUNCH(cat_forward, p);
  return {crop_width(o, call.v.size(3)), lse};
}

std::optional<Gradients> backward_cuda(const Call& call, const OutputGradients& grads,
                                       const SavedTensors& saved) {
  const auto problem = Problem::check(call);
  const c10::cuda::CUDAGuard device(call.q.device());
  if (!is_defined(grads.o) || choose_path(problem, call) == Path::Code::aten) return std::nullopt;
  const auto &lse = saved.lse, &o = saved.o;
  const auto B = call.q.size(0), T = call.q.size(1), HQ = call.q.size(2);
  check_saved_tensor("cat_attention", "lse", lse, {B, T, HQ}, at::kFloat);
  check_saved_tensor("cat_attention", "o", o, {B, T, HQ, call.v.size(3)}, call.q.scalar_type());
  const Arguments args(call);
  const auto dout = align_rows(grads.o->to(call.q.scalar_type())), out = align_rows(o);
  const auto dq = args.empty_like_rows(args.q), dk = args.empty_like_rows(args.k),
             dv = args.empty_like_rows(args.v);
  kernels::CatBackward p;
  args.fill(p);
  p.o = input<4>(out), p.dout = input<4>(dout), p.lse = input<3>(lse);
  p.dq = output<4>(dq), p.dk = output<4>(dk), p.dv = output<4>(dv);
  GIRIH_RUN(cat_backward, p, call.q);
  return Gradients{crop_width(dq, call.q.size(3)), crop_width(dk, call.k.size(3)),
                   crop_width(dv, call.v.size(3)), std::nullopt};
}

}  // namespace

TORCH_LIBRARY_IMPL(girih, CUDA, m) {
  register_explain<Call, Problem, &choose_path>(m);
  register_forward<&forward_cuda>(m);
  register_backward<&backward_cuda>(m);
}

}  // namespace girih::cat_attention
