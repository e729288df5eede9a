// What a language model computes row by row beside its mixers, in training. Not operators for users, who have
// torch.nn.functional's: they take dense tensors of a few types. python/girih/nn/fused.py calls them, decides
// where, and gives them gradients.
#include <torch/library.h>

#include "../kernel_arguments.h"
#include "model_rows/model_rows.h"

namespace girih::model_rows {
namespace {

// A dense tensor of these sizes and this type, where packs of a row can be read.
const void* dense(const Tensor& tensor, const char* name, at::IntArrayRef sizes, at::ScalarType type,
                  const Tensor& x) {
  TORCH_CHECK(tensor.sizes() == sizes, "girih: model_rows: ", name, " has shape ", tensor.sizes(),
              "; expected ", sizes);
  TORCH_CHECK(tensor.scalar_type() == type && tensor.device() == x.device(), "girih: model_rows: ", name,
              " is ", tensor.scalar_type(), " on ", tensor.device(), "; expected ", type, " on ", x.device());
  const auto* data = tensor.const_data_ptr();
  TORCH_CHECK(tensor.is_contiguous() && reinterpret_cast<uintptr_t>(data) % 32 == 0,
              "girih: model_rows: ", name, " has strides ", tensor.strides(),
              "; expected a dense one aligned to 32 bytes");
  return data;
}

const void* dense(const OptionalTensor& tensor, const char* name, at::IntArrayRef sizes, at::ScalarType type,
                  const Tensor& x) {
  return given(tensor) ? dense(*tensor, name, sizes, type, x) : nullptr;
}

bool has_type(at::ScalarType type) {
  return type == at::kFloat || type == at::kHalf || type == at::kBFloat16;
}

kernels::ResidualNormShape shape_of(const Tensor& x, const Tensor& weight, at::ScalarType rows, double eps) {
  TORCH_CHECK(x.dim() >= 1 && has_type(x.scalar_type()) && has_type(rows) &&
                  (x.scalar_type() == rows || x.scalar_type() == at::kFloat),
              "girih: residual_norm: x is ", x.scalar_type(), ", y is ", rows,
              "; expected one of float32, float16 and bfloat16, or an x of float32");
  const int64_t dim = x.size(-1);
  TORCH_CHECK(dim >= 1 && dim % kernels::kModelRowsPack == 0 && dim <= kernels::kResidualNormWidest,
              "girih: residual_norm: x has shape ", x.sizes(), "; expected rows of a multiple of ",
              kernels::kModelRowsPack, " up to ", kernels::kResidualNormWidest);
  TORCH_CHECK(weight.dim() == 1 && weight.size(0) == dim && weight.device() == x.device(),
              "girih: residual_norm: weight has shape ", weight.sizes(), " on ", weight.device(),
              "; expected [", dim, "] on ", x.device());
  const auto dtype = [](at::ScalarType type) {
    return type == at::kFloat  ? kernels::DType::f32
           : type == at::kHalf ? kernels::DType::f16
                               : kernels::DType::bf16;
  };
  return {x.numel() / dim, static_cast<int>(dim), static_cast<float>(eps), dtype(x.scalar_type()),
          dtype(rows)};
}

std::tuple<Tensor, Tensor> norm(const Tensor& x, const OptionalTensor& branch, const Tensor& weight,
                                double eps, at::ScalarType rows) {
  const c10::cuda::CUDAGuard device(x.device());
  kernels::ResidualNorm p{};
  p.shape = shape_of(x, weight, rows, eps);
  p.x = dense(x, "x", x.sizes(), x.scalar_type(), x);
  p.branch = dense(branch, "branch", x.sizes(), rows, x);
  p.weight = input<1>(weight);
  const auto s = given(branch) ? at::empty(x.sizes(), x.options()) : at::empty({0}, x.options());
  const auto y = at::empty(x.sizes(), x.options().dtype(rows));
  p.s = s.mutable_data_ptr();
  p.y = y.mutable_data_ptr();
  check_launch("residual_norm", kernels::residual_norm(p, c10::cuda::getCurrentCUDAStream()));
  return {s, y};
}

std::tuple<Tensor, Tensor, Tensor> norm_backward(const Tensor& dy, const OptionalTensor& after,
                                                 const Tensor& s, const Tensor& weight, double eps,
                                                 bool of_branch) {
  const c10::cuda::CUDAGuard device(s.device());
  kernels::ResidualNormBackward p{};
  p.shape = shape_of(s, weight, dy.scalar_type(), eps);
  p.s = dense(s, "s", s.sizes(), s.scalar_type(), s);
  p.dy = dense(dy, "dy", s.sizes(), dy.scalar_type(), s);
  p.after = dense(after, "ds", s.sizes(), s.scalar_type(), s);
  p.weight = input<1>(weight);
  const auto ds = at::empty(s.sizes(), s.options()), dweight = at::empty(weight.sizes(), weight.options());
  const auto dbranch = of_branch ? at::empty(s.sizes(), dy.options()) : at::empty({0}, dy.options());
  const auto partials = at::empty({kernels::residual_norm_partials(p.shape)}, s.options().dtype(at::kFloat));
  p.ds = ds.mutable_data_ptr();
  p.dbranch = of_branch ? dbranch.mutable_data_ptr() : nullptr;
  p.dweight = output<1>(dweight);
  p.partials = partials.mutable_data_ptr<float>();
  check_launch("residual_norm_backward",
               kernels::residual_norm_backward(p, c10::cuda::getCurrentCUDAStream()));
  return {ds, dbranch, dweight};
}

void check_product(const Tensor& gate) {
  TORCH_CHECK(has_type(gate.scalar_type()) && gate.numel() % kernels::kModelRowsPack == 0,
              "girih: silu_product: gate is ", gate.scalar_type(), " ", gate.sizes(),
              "; expected float32, float16 or bfloat16, a multiple of ", kernels::kModelRowsPack,
              " elements");
}

Tensor product(const Tensor& gate, const Tensor& up) {
  check_product(gate);
  const c10::cuda::CUDAGuard device(gate.device());
  const auto y = at::empty(gate.sizes(), gate.options());
  const kernels::SiluProduct p{gate.numel(), kernel_dtype(gate),
                               dense(gate, "gate", gate.sizes(), gate.scalar_type(), gate),
                               dense(up, "up", gate.sizes(), gate.scalar_type(), gate), y.mutable_data_ptr()};
  check_launch("silu_product", kernels::silu_product(p, c10::cuda::getCurrentCUDAStream()));
  return y;
}

std::tuple<Tensor, Tensor> product_backward(const Tensor& dy, const Tensor& gate, const Tensor& up) {
  check_product(gate);
  const c10::cuda::CUDAGuard device(gate.device());
  const auto type = gate.scalar_type();
  const auto dgate = at::empty(gate.sizes(), gate.options()), dup = at::empty(gate.sizes(), gate.options());
  const kernels::SiluProductBackward p{gate.numel(),
                                       kernel_dtype(gate),
                                       dense(gate, "gate", gate.sizes(), type, gate),
                                       dense(up, "up", gate.sizes(), type, gate),
                                       dense(dy, "dy", gate.sizes(), type, gate),
                                       dgate.mutable_data_ptr(),
                                       dup.mutable_data_ptr()};
  check_launch("silu_product_backward", kernels::silu_product_backward(p, c10::cuda::getCurrentCUDAStream()));
  return {dgate, dup};
}

Tensor cross_entropy_(Tensor& logits, const Tensor& labels, int64_t ignored) {
  TORCH_CHECK(logits.dim() == 2 && has_type(logits.scalar_type()) &&
                  logits.size(1) % kernels::kModelRowsPack == 0 && logits.size(1) > 0,
              "girih: cross_entropy_: logits are ", logits.scalar_type(), " ", logits.sizes(),
              "; expected float32, float16 or bfloat16 [rows, a multiple of ", kernels::kModelRowsPack, "]");
  const c10::cuda::CUDAGuard device(logits.device());
  const int64_t rows = logits.size(0);
  dense(logits, "logits", logits.sizes(), logits.scalar_type(), logits);
  const auto l = at::empty({rows}, logits.options().dtype(at::kFloat));
  kernels::CrossEntropy p{};
  p.rows = rows, p.classes = logits.size(1), p.dtype = kernel_dtype(logits);
  p.z = logits.mutable_data_ptr();
  TORCH_CHECK(labels.dim() == 1 && labels.size(0) == rows && labels.scalar_type() == at::kLong &&
                  labels.is_contiguous() && labels.device() == logits.device(),
              "girih: cross_entropy_: labels are ", labels.scalar_type(), " ", labels.sizes(), " on ",
              labels.device(), "; expected dense int64 [", rows, "] on ", logits.device());
  p.labels = labels.const_data_ptr<int64_t>();
  p.ignored = ignored;
  p.l = l.mutable_data_ptr<float>();
  check_launch("cross_entropy", kernels::cross_entropy(p, c10::cuda::getCurrentCUDAStream()));
  return l;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(girih, m) {
  // s = x + branch (empty where there is no branch: it is x), y [.., dim] in the type `rows`
  m.def(
      "residual_norm(Tensor x, Tensor? branch, Tensor weight, float eps, ScalarType rows) -> (Tensor, "
      "Tensor)");
  m.def(
      "residual_norm_backward(Tensor dy, Tensor? after, Tensor s, Tensor weight, float eps, bool of_branch) "
      "-> "
      "(Tensor, Tensor, Tensor)");
  m.def("silu_product(Tensor gate, Tensor up) -> Tensor");
  m.def("silu_product_backward(Tensor dy, Tensor gate, Tensor up) -> (Tensor, Tensor)");
  // Of every row; logits become the gradient of their sum.
  m.def("cross_entropy_(Tensor(a!) logits, Tensor labels, int ignored) -> Tensor");
}
TORCH_LIBRARY_IMPL(girih, CUDA, m) {
  m.impl("residual_norm", &norm);
  m.impl("residual_norm_backward", &norm_backward);
  m.impl("silu_product", &product);
  m.impl("silu_product_backward", &product_backward);
  m.impl("cross_entropy_", &cross_entropy_);
}

}  // namespace girih::model_rows
