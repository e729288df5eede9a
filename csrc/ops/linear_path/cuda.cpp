// CUDA kernels of girih.conversion for q, k and v of an attention layer before a linear memory. Not public
// operators: python/girih/conversion/rows.py calls them and implements their gradients.
#include <torch/library.h>

#include "../arguments/contiguous.h"
#include "linear_path/linear_path.h"

namespace girih::linear_path {
namespace {

constexpr const char* kOp = "linear_path";

constexpr int kPack = kernels::kLinearPathPack;

void check_rows(const Tensor& x, const char* name) {
  TORCH_CHECK(x.dim() == 4 && has_kernel_dtype(x.scalar_type()) && x.size(3) >= kPack &&
                  x.size(3) % kPack == 0 && x.size(3) <= kernels::kLinearPathMaxWidth &&
                  x.numel() / x.size(3) <= 0x7fffffff,
              "girih: ", kOp, ": ", name, " is ", x.scalar_type(), " ", x.sizes(),
              "; expected float32, float16 or bfloat16 [B, T, heads, a multiple of ", kPack, " up to ",
              kernels::kLinearPathMaxWidth, "] of less than 2^31 rows");
}

// x itself if the heads of a token are contiguous and rows are aligned for vector accesses, else a copy.
Tensor as_token_rows(const Tensor& x) {
  const auto multiple = [&](int64_t stride, int64_t size) { return size <= 1 || stride % kPack == 0; };
  const auto is_aligned = reinterpret_cast<uintptr_t>(x.const_data_ptr()) % (kPack * x.element_size()) == 0;
  const bool has_token_rows =
      x.numel() == 0 || (is_aligned && x.stride(3) == 1 && (x.size(2) == 1 || x.stride(2) == x.size(3)) &&
                         multiple(x.stride(1), x.size(1)) && multiple(x.stride(0), x.size(0)));
  return has_token_rows ? x : x.clone(at::MemoryFormat::Contiguous);
}

kernels::TokenRows token_rows(const Tensor& x) { return {x.const_data_ptr(), x.stride(0), x.stride(1)}; }

// q, k and v as the kernels read them.
struct VirtualRowInputs {
  Tensor q, k, v;
  kernels::VirtualRowsShape shape;

  VirtualRowInputs(const Tensor& q_, const Tensor& k_, const Tensor& v_, int64_t n) {
    check_rows(q_, "q");
    const auto B = q_.size(0), T = q_.size(1), D = q_.size(3);
    const auto check_like_q = [&](const Tensor& x, const char* name, int64_t heads) {
      TORCH_CHECK(x.sizes() == at::IntArrayRef({B, T, heads, D}) && x.scalar_type() == q_.scalar_type() &&
                      x.device() == q_.device(),
                  "girih: ", kOp, ": ", name, " is ", x.scalar_type(), " ", x.sizes(), " on ", x.device(),
                  "; expected ", q_.scalar_type(), " [", B, ", ", T, ", heads, ", D, "] on ", q_.device(),
                  ", the same for k and v");
      check_rows(x, name);
      return as_token_rows(x);
    };
    TORCH_CHECK(k_.dim() == 4, "girih: ", kOp, ": k has shape ", k_.sizes(), "; expected [B, T, heads, D]");
    TORCH_CHECK(1 <= n && n <= kernels::kMaxVirtualRows, "girih: ", kOp, ": n is ", n, "; expected 1 to ",
                kernels::kMaxVirtualRows);
    q = as_token_rows(q_), k = check_like_q(k_, "k", k_.size(2)), v = check_like_q(v_, "v", k_.size(2));
    shape = {B,
             T,
             static_cast<int>(q.size(2)),
             static_cast<int>(k.size(2)),
             static_cast<int>(D),
             static_cast<int>(n),
             kernel_dtype(q)};
  }
  template <class Problem>
  void fill(Problem& p) const {
    p.shape = shape, p.q = token_rows(q), p.k = token_rows(k), p.v = token_rows(v);
  }
  // The sizes of the virtual rows of k and of v.
  std::vector<int64_t> kv_sizes() const {
    return {shape.batch, shape.tokens * shape.n, shape.heads, shape.D};
  }
};

using TensorTriple = std::tuple<Tensor, Tensor, Tensor>;

TensorTriple virtual_rows(const Tensor& q, const Tensor& k, const Tensor& v, int64_t n) {
  const c10::cuda::CUDAGuard device(q.device());
  const VirtualRowInputs rows(q, k, v, n);
  kernels::VirtualRows p{};
  rows.fill(p);
  const auto of_q = at::empty(q.sizes(), q.options());
  const auto of_k = at::empty(rows.kv_sizes(), q.options()), of_v = at::empty_like(of_k);
  p.rows_q = of_q.mutable_data_ptr(), p.rows_k = of_k.mutable_data_ptr(), p.rows_v = of_v.mutable_data_ptr();
  GIRIH_LAUNCH(virtual_rows, p);
  return {of_q, of_k, of_v};
}

TensorTriple virtual_rows_backward(const Tensor& of_q_, const Tensor& of_k_, const Tensor& of_v_,
                                   const Tensor& q, const Tensor& k, const Tensor& v, int64_t n) {
  const c10::cuda::CUDAGuard device(q.device());
  const VirtualRowInputs rows(q, k, v, n);
  kernels::VirtualRowsBackward p{};
  rows.fill(p);
  const auto type = q.scalar_type();
  const auto of_q = contiguous_argument(kOp, of_q_, "dq", q.sizes(), type, q),
             of_k = contiguous_argument(kOp, of_k_, "dk", rows.kv_sizes(), type, q),
             of_v = contiguous_argument(kOp, of_v_, "dv", rows.kv_sizes(), type, q);
  p.rows_q = of_q.const_data_ptr(), p.rows_k = of_k.const_data_ptr(), p.rows_v = of_v.const_data_ptr();
  const auto dq = at::empty(q.sizes(), q.options());
  const auto dk = at::empty(k.sizes(), k.options()), dv = at::empty(v.sizes(), v.options());
  p.dq = dq.mutable_data_ptr(), p.dk = dk.mutable_data_ptr(), p.dv = dv.mutable_data_ptr();
  GIRIH_LAUNCH(virtual_rows_backward, p);
  return {dq, dk, dv};
}

// The running sum of x in `type`: the dtype of x, except that fp16 has sums in fp32. For backward also fp32
// -> fp16.
Tensor running_sum(const Tensor& x_, bool from_end, at::ScalarType type) {
  check_rows(x_, "x");
  const auto own = x_.scalar_type();
  const auto is_half_pair = [&](at::ScalarType a, at::ScalarType b) {
    return a == at::kHalf && b == at::kFloat;
  };
  TORCH_CHECK((type == own && own != at::kHalf) || is_half_pair(own, type) || is_half_pair(type, own),
              "girih: ", kOp, ": dtype is ", type, "; expected ", own == at::kHalf ? at::kFloat : own,
              " for x of dtype ", own);
  const c10::cuda::CUDAGuard device(x_.device());
  const auto x = as_token_rows(x_), total = at::empty(x_.sizes(), x_.options().dtype(type));
  const kernels::RunningSum p{x.size(0),
                              x.size(1),
                              static_cast<int>(x.size(2) * x.size(3)),
                              from_end,
                              kernel_dtype(x),
                              kernel_dtype(total),
                              token_rows(x),
                              total.mutable_data_ptr()};
  GIRIH_LAUNCH(running_sum, p);
  return total;
}

Tensor pooled_gate(const Tensor& total_) {
  check_rows(total_, "total");
  const c10::cuda::CUDAGuard device(total_.device());
  const auto total = contiguous_argument(kOp, total_, "total", total_.sizes(), total_.scalar_type(), total_);
  const auto beta = at::empty(total.sizes().slice(0, 3), total.options().dtype(at::kFloat));
  const kernels::PooledGate p{total.size(0),
                              total.size(1),
                              static_cast<int>(total.size(2)),
                              static_cast<int>(total.size(3)),
                              kernel_dtype(total),
                              total.const_data_ptr(),
                              beta.mutable_data_ptr<float>()};
  GIRIH_LAUNCH(pooled_gate, p);
  return beta;
}

Tensor pooled_gate_backward(const Tensor& dbeta_, const Tensor& total_) {
  check_rows(total_, "total");
  const c10::cuda::CUDAGuard device(total_.device());
  const auto total = contiguous_argument(kOp, total_, "total", total_.sizes(), total_.scalar_type(), total_);
  const auto dbeta = contiguous_argument(kOp, dbeta_, "dbeta", total.sizes().slice(0, 3), at::kFloat, total);
  const auto dtotal = at::empty(total.sizes(), total.options());
  const kernels::PooledGateBackward p{total.size(0),
                                      total.size(1),
                                      static_cast<int>(total.size(2)),
                                      static_cast<int>(total.size(3)),
                                      kernel_dtype(total),
                                      total.const_data_ptr(),
                                      dbeta.const_data_ptr<float>(),
                                      dtotal.mutable_data_ptr()};
  GIRIH_LAUNCH(pooled_gate_backward, p);
  return dtotal;
}

Tensor channel_gate(const Tensor& total_, int64_t n) {
  check_rows(total_, "total");
  TORCH_CHECK(n >= 1, "girih: ", kOp, ": n is ", n, "; expected 1 or more");
  const c10::cuda::CUDAGuard device(total_.device());
  const auto total = contiguous_argument(kOp, total_, "total", total_.sizes(), total_.scalar_type(), total_);
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
  GIRIH_LAUNCH(channel_gate, p);
  return beta;
}

Tensor channel_gate_backward(const Tensor& dbeta_, const Tensor& total_, int64_t n) {
  check_rows(total_, "total");
  TORCH_CHECK(n >= 1, "girih: ", kOp, ": n is ", n, "; expected 1 or more");
  const c10::cuda::CUDAGuard device(total_.device());
  const auto total = contiguous_argument(kOp, total_, "total", total_.sizes(), total_.scalar_type(), total_);
  const auto dbeta = contiguous_argument(kOp, dbeta_, "dbeta",
                                         {total.size(0), total.size(1) * n, total.size(2), total.size(3)},
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
  GIRIH_LAUNCH(channel_gate_backward, p);
  return dtotal;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(girih, m) {
  m.def("virtual_rows(Tensor q, Tensor k, Tensor v, int n) -> (Tensor, Tensor, Tensor)");
  m.def(
      "virtual_rows_backward(Tensor dq, Tensor dk, Tensor dv, Tensor q, Tensor k, Tensor v, int n) -> "
      "(Tensor, "
      "Tensor, Tensor)");
  m.def("running_sum(Tensor x, bool from_end, ScalarType dtype) -> Tensor");
  m.def("pooled_gate(Tensor total) -> Tensor");
  m.def("pooled_gate_backward(Tensor dbeta, Tensor total) -> Tensor");
  m.def("channel_gate(Tensor total, int n) -> Tensor");
  m.def("channel_gate_backward(Tensor dbeta, Tensor total, int n) -> Tensor");
}
TORCH_LIBRARY_IMPL(girih, CUDA, m) {
  m.impl("virtual_rows", &virtual_rows);
  m.impl("virtual_rows_backward", &virtual_rows_backward);
  m.impl("running_sum", &running_sum);
  m.impl("pooled_gate", &pooled_gate);
  m.impl("pooled_gate_backward", &pooled_gate_backward);
  m.impl("channel_gate", &channel_gate);
  m.impl("channel_gate_backward", &channel_gate_backward);
}

}  // namespace girih::linear_path
