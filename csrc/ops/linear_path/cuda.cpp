// What girih.conversion computes of an attention's q, k and v before a memory. Not operators for users: they
// serve python/girih/conversion/rows.py, which decides where and gives them gradients.
#include <torch/library.h>

#include "../dense.h"
#include "linear_path/linear_path.h"

namespace girih::linear_path {
namespace {

constexpr const char* kOp = "linear_path";

void check_rows(const Tensor& x, const char* name) {
  TORCH_CHECK(x.dim() == 4 && is_of_kernels(x.scalar_type()) && x.size(3) >= kernels::kLinearPathPack &&
                  x.size(3) % kernels::kLinearPathPack == 0 && x.size(3) <= kernels::kLinearPathWidest &&
                  x.numel() / x.size(3) <= 0x7fffffff,
              "girih: ", kOp, ": ", name, " is ", x.scalar_type(), " ", x.sizes(),
              "; expected float32, float16 or bfloat16 [B, T, heads, a multiple of ",
              kernels::kLinearPathPack, " up to ", kernels::kLinearPathWidest, "] of less than 2^31 rows");
}

kernels::VirtualRowsShape shape_of(const Tensor& x, int64_t query_heads, int64_t n) {
  check_rows(x, "x");
  const auto heads = x.size(2);
  TORCH_CHECK(0 <= query_heads && query_heads <= heads && (heads - query_heads) % 2 == 0, "girih: ", kOp,
              ": query_heads is ", query_heads, "; expected the heads of x, ", heads,
              ", less those of k and as many of v");
  TORCH_CHECK(1 <= n && n <= kernels::kMostVirtualRows, "girih: ", kOp, ": n is ", n, "; expected 1 to ",
              kernels::kMostVirtualRows);
  return {x.size(0),
          x.size(1),
          static_cast<int>(query_heads),
          static_cast<int>((heads - query_heads) / 2),
          static_cast<int>(x.size(3)),
          static_cast<int>(n),
          kernel_dtype(x)};
}

std::tuple<Tensor, Tensor, Tensor> virtual_rows(const Tensor& x_, int64_t query_heads, int64_t n) {
  const c10::cuda::CUDAGuard device(x_.device());
  kernels::VirtualRows p{};
  p.shape = shape_of(x_, query_heads, n);
  const auto x = dense(kOp, x_, "x", x_.sizes(), x_.scalar_type(), x_);
  const auto B = x.size(0), T = x.size(1), D = x.size(3);
  const auto q = at::empty({B, T, query_heads, D}, x.options());
  const auto k = at::empty({B, T * n, p.shape.heads, D}, x.options()), v = at::empty_like(k);
  p.x = x.const_data_ptr();
  p.q = q.mutable_data_ptr(), p.k = k.mutable_data_ptr(), p.v = v.mutable_data_ptr();
  check_launch("virtual_rows", kernels::virtual_rows(p, c10::cuda::getCurrentCUDAStream()));
  return {q, k, v};
}

Tensor virtual_rows_backward(const Tensor& dq_, const Tensor& dk_, const Tensor& dv_, const Tensor& x_,
                             int64_t query_heads, int64_t n) {
  const c10::cuda::CUDAGuard device(x_.device());
  kernels::VirtualRowsBackward p{};
  p.shape = shape_of(x_, query_heads, n);
  const auto type = x_.scalar_type();
  const auto x = dense(kOp, x_, "x", x_.sizes(), type, x_);
  const auto B = x.size(0), T = x.size(1), D = x.size(3);
  const auto dq = dense(kOp, dq_, "dq", {B, T, query_heads, D}, type, x),
             dk = dense(kOp, dk_, "dk", {B, T * n, p.shape.heads, D}, type, x),
             dv = dense(kOp, dv_, "dv", {B, T * n, p.shape.heads, D}, type, x);
  const auto dx = at::empty(x.sizes(), x.options());
  p.x = x.const_data_ptr(), p.dx = dx.mutable_data_ptr();
  p.dq = dq.const_data_ptr(), p.dk = dk.const_data_ptr(), p.dv = dv.const_data_ptr();
  check_launch("virtual_rows_backward", kernels::virtual_rows_backward(p, c10::cuda::getCurrentCUDAStream()));
  return dx;
}

Tensor pooled_gate(const Tensor& total_) {
  check_rows(total_, "total");
  const c10::cuda::CUDAGuard device(total_.device());
  const auto total = dense(kOp, total_, "total", total_.sizes(), total_.scalar_type(), total_);
  const auto beta = at::empty(total.sizes().slice(0, 3), total.options().dtype(at::kFloat));
  const kernels::PooledGate p{total.size(0),
                              total.size(1),
                              static_cast<int>(total.size(2)),
                              static_cast<int>(total.size(3)),
                              kernel_dtype(total),
                              total.const_data_ptr(),
                              beta.mutable_data_ptr<float>()};
  check_launch("pooled_gate", kernels::pooled_gate(p, c10::cuda::getCurrentCUDAStream()));
  return beta;
}

Tensor pooled_gate_backward(const Tensor& dbeta_, const Tensor& total_) {
  check_rows(total_, "total");
  const c10::cuda::CUDAGuard device(total_.device());
  const auto total = dense(kOp, total_, "total", total_.sizes(), total_.scalar_type(), total_);
  const auto dbeta = dense(kOp, dbeta_, "dbeta", total.sizes().slice(0, 3), at::kFloat, total);
  const auto dtotal = at::empty(total.sizes(), total.options());
  const kernels::PooledGateBackward p{total.size(0),
                                      total.size(1),
                                      static_cast<int>(total.size(2)),
                                      static_cast<int>(total.size(3)),
                                      kernel_dtype(total),
                                      total.const_data_ptr(),
                                      dbeta.const_data_ptr<float>(),
                                      dtotal.mutable_data_ptr()};
  check_launch("pooled_gate_backward", kernels::pooled_gate_backward(p, c10::cuda::getCurrentCUDAStream()));
  return dtotal;
}

Tensor channel_gate(const Tensor& total_, int64_t n) {
  check_rows(total_, "total");
  TORCH_CHECK(n >= 1, "girih: ", kOp, ": n is ", n, "; expected 1 or more");
  const c10::cuda::CUDAGuard device(total_.device());
  const auto total = dense(kOp, total_, "total", total_.sizes(), total_.scalar_type(), total_);
  const auto beta =
      at::empty({total.size(0), total.size(1) * n, total.size(2), total.size(3)}, total.options());
  const kernels::ChannelGate p{total.size(0),
                               total.size(1),
                               static_cast<int>(total.size(2)),
                               static_cast<int>(total.size(3)),
                               static_cast<int>(n),
                               kernel_dtype(total),
                               total.const_data_ptr(),
                               beta.mutable_data_ptr()};
  check_launch("channel_gate", kernels::channel_gate(p, c10::cuda::getCurrentCUDAStream()));
  return beta;
}

Tensor channel_gate_backward(const Tensor& dbeta_, const Tensor& total_, int64_t n) {
  check_rows(total_, "total");
  TORCH_CHECK(n >= 1, "girih: ", kOp, ": n is ", n, "; expected 1 or more");
  const c10::cuda::CUDAGuard device(total_.device());
  const auto total = dense(kOp, total_, "total", total_.sizes(), total_.scalar_type(), total_);
  const auto dbeta =
      dense(kOp, dbeta_, "dbeta", {total.size(0), total.size(1) * n, total.size(2), total.size(3)},
            total.scalar_type(), total);
  const auto dtotal = at::empty(total.sizes(), total.options());
  const kernels::ChannelGateBackward p{total.size(0),
                                       total.size(1),
                                       static_cast<int>(total.size(2)),
                                       static_cast<int>(total.size(3)),
                                       static_cast<int>(n),
                                       kernel_dtype(total),
                                       total.const_data_ptr(),
                                       dbeta.const_data_ptr(),
                                       dtotal.mutable_data_ptr()};
  check_launch("channel_gate_backward", kernels::channel_gate_backward(p, c10::cuda::getCurrentCUDAStream()));
  return dtotal;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(girih, m) {
  m.def("virtual_rows(Tensor x, int query_heads, int n) -> (Tensor q, Tensor k, Tensor v)");
  m.def("virtual_rows_backward(Tensor dq, Tensor dk, Tensor dv, Tensor x, int query_heads, int n) -> Tensor");
  m.def("pooled_gate(Tensor total) -> Tensor");
  m.def("pooled_gate_backward(Tensor dbeta, Tensor total) -> Tensor");
  m.def("channel_gate(Tensor total, int n) -> Tensor");
  m.def("channel_gate_backward(Tensor dbeta, Tensor total, int n) -> Tensor");
}
TORCH_LIBRARY_IMPL(girih, CUDA, m) {
  m.impl("virtual_rows", &virtual_rows);
  m.impl("virtual_rows_backward", &virtual_rows_backward);
  m.impl("pooled_gate", &pooled_gate);
  m.impl("pooled_gate_backward", &pooled_gate_backward);
  m.impl("channel_gate", &channel_gate);
  m.impl("channel_gate_backward", &channel_gate_backward);
}

}  // namespace girih::linear_path
