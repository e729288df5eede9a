// CUDA implementation of the row-wise functions of a language model: residual_norm, silu_norm, silu_product,
// rotary, cross_entropy. See ../fused/fused.h for the equations and the gradients.
#include <torch/library.h>

#include "../arguments/contiguous.h"
#include "elementwise/elementwise.h"

namespace girih::elementwise {
namespace {

kernels::ResidualNormShape shape_of(const char* op, const Tensor& x, const OptionalTensor& weight,
                                    at::ScalarType rows, double eps, bool use_silu) {
  TORCH_CHECK(x.dim() >= 1 && has_kernel_dtype(x.scalar_type()) && has_kernel_dtype(rows) &&
                  (x.scalar_type() == rows || (x.scalar_type() == at::kFloat && !use_silu)),
              "girih: ", op, ": x is ", x.scalar_type(), ", y is ", rows,
              "; expected one of float32, float16 and bfloat16",
              use_silu ? " for both" : ", or an x of float32");
  const int64_t dim = x.size(-1);
  TORCH_CHECK(dim >= 1 && dim % kernels::kElementwisePack == 0 && dim <= kernels::kResidualNormMaxDim,
              "girih: ", op, ": x has shape ", x.sizes(), "; expected rows of a multiple of ",
              kernels::kElementwisePack, " up to ", kernels::kResidualNormMaxDim);
  if (is_defined(weight)) {
    TORCH_CHECK(weight->dim() == 1 && weight->size(0) == dim && weight->device() == x.device(), "girih: ", op,
                ": weight has shape ", weight->sizes(), " on ", weight->device(), "; expected [", dim,
                "] on ", x.device());
  }
  const auto dtype = [](at::ScalarType type) {
    return type == at::kFloat  ? kernels::DType::f32
           : type == at::kHalf ? kernels::DType::f16
                               : kernels::DType::bf16;
  };
  return {x.numel() / dim,        static_cast<int>(dim), static_cast<float>(eps),
          dtype(x.scalar_type()), dtype(rows),           use_silu};
}

Tensor new_empty(const Tensor& x) { return at::empty({0}, x.options()); }

std::tuple<Tensor, Tensor> run_norm(const char* op, const Tensor& x_, const OptionalTensor& branch_,
                                    const OptionalTensor& weight, double eps, at::ScalarType rows,
                                    bool use_silu) {
  const c10::cuda::CUDAGuard device(x_.device());
  kernels::ResidualNorm p{};
  p.shape = shape_of(op, x_, weight, rows, eps, use_silu);
  const auto x = contiguous_argument(op, x_, "x", x_.sizes(), x_.scalar_type(), x_);
  const auto branch = contiguous_argument(op, branch_, "branch", x.sizes(), rows, x);
  p.x = x.const_data_ptr(), p.branch = data_or_null(branch);
  if (is_defined(weight)) p.weight = input<1>(*weight);
  const auto s = is_defined(branch) ? at::empty(x.sizes(), x.options()) : x_;
  const auto y = at::empty(x.sizes(), x.options().dtype(rows));
  p.s = is_defined(branch) ? s.mutable_data_ptr() : nullptr;
  p.y = y.mutable_data_ptr();
  check_launch(op, kernels::residual_norm(p, c10::cuda::getCurrentCUDAStream()));
  return {s, y};
}

std::tuple<Tensor, Tensor> residual_norm(const Tensor& x, const OptionalTensor& branch,
                                         const OptionalTensor& weight, double eps, at::ScalarType rows) {
  return run_norm("residual_norm", x, branch, weight, eps, rows, false);
}

Tensor silu_norm(const Tensor& x, const Tensor& weight, double eps) {
  return std::get<1>(run_norm("silu_norm", x, std::nullopt, weight, eps, x.scalar_type(), true));
}

std::tuple<Tensor, Tensor, Tensor> run_norm_backward(const char* op, const Tensor& dy_,
                                                     const OptionalTensor& after_, const Tensor& s_,
                                                     const OptionalTensor& weight, double eps, bool of_branch,
                                                     bool of_weight, bool use_silu) {
  TORCH_CHECK(is_defined(weight) || !of_weight, "girih: ", op,
              ": of_weight is True but weight is None; expected of_weight = False");
  const c10::cuda::CUDAGuard device(s_.device());
  kernels::ResidualNormBackward p{};
  p.shape = shape_of(op, s_, weight, dy_.scalar_type(), eps, use_silu);
  const auto s = contiguous_argument(op, s_, "s", s_.sizes(), s_.scalar_type(), s_);
  const auto dy = contiguous_argument(op, dy_, "dy", s.sizes(), dy_.scalar_type(), s);
  const auto after = contiguous_argument(op, after_, "after", s.sizes(), s.scalar_type(), s);
  p.s = s.const_data_ptr(), p.dy = dy.const_data_ptr(), p.after = data_or_null(after);
  if (is_defined(weight)) p.weight = input<1>(*weight);
  const auto ds = at::empty(s.sizes(), s.options());
  const auto dbranch = of_branch ? at::empty(s.sizes(), dy.options()) : new_empty(dy);
  const auto dweight = of_weight ? at::empty(weight->sizes(), weight->options()) : new_empty(s);
  p.ds = ds.mutable_data_ptr();
  p.dbranch = of_branch ? dbranch.mutable_data_ptr() : nullptr;
  if (of_weight) p.dweight = output<1>(dweight);
  TensorWorkspace workspace(s);
  check_launch(op, kernels::residual_norm_backward(p, workspace, c10::cuda::getCurrentCUDAStream()));
  return {ds, dbranch, dweight};
}

std::tuple<Tensor, Tensor, Tensor> residual_norm_backward(const Tensor& dy, const OptionalTensor& after,
                                                          const Tensor& s, const OptionalTensor& weight,
                                                          double eps, bool of_branch, bool of_weight) {
  return run_norm_backward("residual_norm_backward", dy, after, s, weight, eps, of_branch, of_weight, false);
}

std::tuple<Tensor, Tensor> silu_norm_backward(const Tensor& dy, const Tensor& x, const Tensor& weight,
                                              double eps, bool of_weight) {
  const auto [dx, none, dweight] =
      run_norm_backward("silu_norm_backward", dy, std::nullopt, x, weight, eps, false, of_weight, true);
  return {dx, dweight};
}

void check_gate(const Tensor& gate) {
  TORCH_CHECK(has_kernel_dtype(gate.scalar_type()) && gate.numel() % kernels::kElementwisePack == 0,
              "girih: silu_product: gate is ", gate.scalar_type(), " ", gate.sizes(),
              "; expected float32, float16 or bfloat16, a multiple of ", kernels::kElementwisePack,
              " elements");
}

Tensor run_silu_product(const Tensor& gate_, const Tensor& up_) {
  check_gate(gate_);
  const c10::cuda::CUDAGuard device(gate_.device());
  const auto type = gate_.scalar_type();
  const auto gate = contiguous_argument("silu_product", gate_, "gate", gate_.sizes(), type, gate_),
             up = contiguous_argument("silu_product", up_, "up", gate.sizes(), type, gate);
  const auto y = at::empty(gate.sizes(), gate.options());
  const kernels::SiluProduct p{gate.numel(), kernel_dtype(gate), gate.const_data_ptr(), up.const_data_ptr(),
                               y.mutable_data_ptr()};
  GIRIH_LAUNCH(silu_product, p);
  return y;
}

std::tuple<Tensor, Tensor, Tensor> run_silu_product_backward(const Tensor& dy_, const Tensor& gate_,
                                                             const Tensor& up_, bool of_product) {
  check_gate(gate_);
  const c10::cuda::CUDAGuard device(gate_.device());
  const auto type = gate_.scalar_type();
  const auto gate = contiguous_argument("silu_product_backward", gate_, "gate", gate_.sizes(), type, gate_),
             up = contiguous_argument("silu_product_backward", up_, "up", gate.sizes(), type, gate),
             dy = contiguous_argument("silu_product_backward", dy_, "dy", gate.sizes(), type, gate);
  const auto dgate = at::empty(gate.sizes(), gate.options()), dup = at::empty(gate.sizes(), gate.options());
  const auto y = of_product ? at::empty(gate.sizes(), gate.options()) : new_empty(gate);
  kernels::SiluProductBackward p{};
  p.elements = gate.numel(), p.dtype = kernel_dtype(gate);
  p.gate = gate.const_data_ptr(), p.up = up.const_data_ptr(), p.dy = dy.const_data_ptr();
  p.dgate = dgate.mutable_data_ptr(), p.dup = dup.mutable_data_ptr();
  p.y = of_product ? y.mutable_data_ptr() : nullptr;
  GIRIH_LAUNCH(silu_product_backward, p);
  return {dgate, dup, y};
}

Tensor cross_entropy_(Tensor& logits, const Tensor& labels, int64_t ignored) {
  TORCH_CHECK(logits.dim() == 2 && has_kernel_dtype(logits.scalar_type()) &&
                  logits.size(1) % kernels::kElementwisePack == 0 && logits.size(1) > 0,
              "girih: cross_entropy_: logits are ", logits.scalar_type(), " ", logits.sizes(),
              "; expected float32, float16 or bfloat16 [rows, a multiple of ", kernels::kElementwisePack,
              "]");
  const c10::cuda::CUDAGuard device(logits.device());
  const int64_t rows = logits.size(0);
  const auto remainder = reinterpret_cast<uintptr_t>(logits.const_data_ptr()) % kVectorAlignment;
  TORCH_CHECK(logits.is_contiguous() && remainder == 0, "girih: cross_entropy_: logits have strides ",
              logits.strides(), " and begin ", remainder, " bytes after a multiple of ", kVectorAlignment,
              "; expected contiguous logits that begin at a multiple, since they are written in place");
  const auto l = at::empty({rows}, logits.options().dtype(at::kFloat));
  kernels::CrossEntropy p{};
  p.rows = rows, p.classes = logits.size(1), p.dtype = kernel_dtype(logits);
  p.z = logits.mutable_data_ptr();
  TORCH_CHECK(labels.dim() == 1 && labels.size(0) == rows && labels.scalar_type() == at::kLong &&
                  labels.is_contiguous() && labels.device() == logits.device(),
              "girih: cross_entropy_: labels are ", labels.scalar_type(), " ", labels.sizes(), " on ",
              labels.device(), "; expected contiguous int64 [", rows, "] on ", logits.device());
  p.labels = labels.const_data_ptr<int64_t>();
  p.ignored = ignored;
  p.l = l.mutable_data_ptr<float>();
  GIRIH_LAUNCH(cross_entropy, p);
  return l;
}

kernels::RotaryShape rotary_shape(const Tensor& x, at::IntArrayRef sizes, int64_t query_heads,
                                  const Tensor& position, const Tensor& rate) {
  constexpr int kPair = 2 * kernels::kElementwisePack;
  const auto B = sizes[0], T = sizes[1], heads = sizes[2], D = sizes[3];
  TORCH_CHECK(has_kernel_dtype(x.scalar_type()) && D >= kPair && D % kPair == 0 &&
                  D <= kernels::kRotaryMaxDim && B * T <= 0x7fffffff,
              "girih: rotary: x is ", x.scalar_type(), " ", sizes,
              "; expected float32, float16 or bfloat16 [B, T, heads, a multiple of ", kPair, " up to ",
              kernels::kRotaryMaxDim, "] of less than 2^31 tokens");
  TORCH_CHECK(0 <= query_heads && query_heads <= heads && (heads - query_heads) % 2 == 0,
              "girih: rotary: query_heads is ", query_heads, "; expected the number of heads of x, ", heads,
              ", minus those of k and v, which are equal");
  const bool has_row_positions = position.dim() == 2;
  TORCH_CHECK(position.scalar_type() == at::kLong && position.device() == x.device() &&
                  position.sizes() == (has_row_positions ? at::IntArrayRef({B, T}) : at::IntArrayRef({T})),
              "girih: rotary: position is ", position.scalar_type(), " ", position.sizes(), " on ",
              position.device(), "; expected Long [", T, "] or [", B, ", ", T, "] on ", x.device());
  TORCH_CHECK(rate.scalar_type() == at::kFloat && rate.device() == x.device() &&
                  rate.sizes() == at::IntArrayRef({D / 2}) && rate.is_contiguous(),
              "girih: rotary: rate is ", rate.scalar_type(), " ", rate.sizes(), " on ", rate.device(),
              "; expected contiguous Float [", D / 2, "] on ", x.device());
  return {B,
          T,
          static_cast<int>(query_heads),
          static_cast<int>((heads - query_heads) / 2),
          static_cast<int>(D),
          kernel_dtype(x),
          position.const_data_ptr<int64_t>(),
          has_row_positions,
          rate.const_data_ptr<float>()};
}

std::tuple<Tensor, Tensor, Tensor> rotary(const Tensor& x_, int64_t query_heads, const Tensor& position_,
                                          const Tensor& rate) {
  TORCH_CHECK(x_.dim() == 4, "girih: rotary: x has shape ", x_.sizes(), "; expected [B, T, heads, D]");
  const c10::cuda::CUDAGuard device(x_.device());
  const auto position = position_.contiguous();
  kernels::Rotary p{};
  p.shape = rotary_shape(x_, x_.sizes(), query_heads, position, rate);
  const auto x = contiguous_argument("rotary", x_, "x", x_.sizes(), x_.scalar_type(), x_);
  const auto rows = [&](int64_t heads) {
    return at::empty({x.size(0), x.size(1), heads, x.size(3)}, x.options());
  };
  const auto q = rows(query_heads), k = rows(p.shape.heads), v = rows(p.shape.heads);
  p.x = x.const_data_ptr();
  p.q = q.mutable_data_ptr(), p.k = k.mutable_data_ptr(), p.v = v.mutable_data_ptr();
  GIRIH_LAUNCH(rotary, p);
  return {q, k, v};
}

Tensor rotary_backward(const Tensor& dq_, const Tensor& dk_, const Tensor& dv_, const Tensor& position_,
                       const Tensor& rate) {
  TORCH_CHECK(dq_.dim() == 4 && dk_.dim() == 4, "girih: rotary_backward: dq has shape ", dq_.sizes(), ", dk ",
              dk_.sizes(), "; expected [B, T, heads, D]");
  const c10::cuda::CUDAGuard device(dq_.device());
  const auto position = position_.contiguous();
  const auto type = dq_.scalar_type();
  const auto heads = dk_.size(2);
  const std::vector<int64_t> sizes{dq_.size(0), dq_.size(1), dq_.size(2) + 2 * heads, dq_.size(3)},
      kv_sizes{sizes[0], sizes[1], heads, sizes[3]};
  kernels::RotaryBackward p{};
  p.shape = rotary_shape(dq_, sizes, dq_.size(2), position, rate);
  const auto dq = contiguous_argument("rotary_backward", dq_, "dq", dq_.sizes(), type, dq_),
             dk = contiguous_argument("rotary_backward", dk_, "dk", kv_sizes, type, dq_),
             dv = contiguous_argument("rotary_backward", dv_, "dv", kv_sizes, type, dq_);
  const auto dx = at::empty(sizes, dq_.options());
  p.dq = dq.const_data_ptr(), p.dk = dk.const_data_ptr(), p.dv = dv.const_data_ptr();
  p.dx = dx.mutable_data_ptr();
  GIRIH_LAUNCH(rotary_backward, p);
  return dx;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(girih, m) {
  // s = x + branch, or x without a branch; y [.., dim] = RMSNorm(s) in the dtype `rows`; without a weight the
  // rows of y have length 1
  m.def(
      "residual_norm(Tensor(a) x, Tensor? branch, Tensor? weight, float eps, ScalarType rows)"
      " -> (Tensor(a) s, Tensor y)");
  // A gradient that is not requested is empty.
  m.def(
      "residual_norm_backward(Tensor dy, Tensor? after, Tensor s, Tensor? weight, float eps, bool of_branch,"
      " bool of_weight) -> (Tensor ds, Tensor dbranch, Tensor dweight)");
  m.def("silu_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def(
      "silu_norm_backward(Tensor dy, Tensor x, Tensor weight, float eps, bool of_weight)"
      " -> (Tensor dx, Tensor dweight)");
  m.def("silu_product_forward(Tensor gate, Tensor up) -> Tensor");
  m.def(
      "silu_product_backward(Tensor dy, Tensor gate, Tensor up, bool of_product)"
      " -> (Tensor dgate, Tensor dup, Tensor y)");
  // x [B, T, heads of q, k and v, D] -> q, k, v; q and k rotated by position * rate
  m.def("rotary(Tensor x, int query_heads, Tensor position, Tensor rate) -> (Tensor q, Tensor k, Tensor v)");
  m.def("rotary_backward(Tensor dq, Tensor dk, Tensor dv, Tensor position, Tensor rate) -> Tensor");
  // The cross entropy of every row; the logits are overwritten by the gradient of the sum.
  m.def("cross_entropy_(Tensor(a!) logits, Tensor labels, int ignored) -> Tensor");
}
TORCH_LIBRARY_IMPL(girih, CUDA, m) {
  m.impl("residual_norm", &residual_norm);
  m.impl("residual_norm_backward", &residual_norm_backward);
  m.impl("silu_norm", &silu_norm);
  m.impl("silu_norm_backward", &silu_norm_backward);
  m.impl("silu_product_forward", &run_silu_product);
  m.impl("silu_product_backward", &run_silu_product_backward);
  m.impl("rotary", &rotary);
  m.impl("rotary_backward", &rotary_backward);
  m.impl("cross_entropy_", &cross_entropy_);
}

}  // namespace girih::elementwise
