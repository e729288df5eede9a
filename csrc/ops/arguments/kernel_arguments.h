// Conversion of tensors to the arguments of kernels, and errors of launches.
#pragma once

#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "aligned_rows.h"
#include "check.h"
#include "path.h"
#include "tile/array.h"
#include "tile/last_error.h"
#include "tile/sequence.h"
#include "tile/workspace.h"

namespace girih {

inline kernels::DType kernel_dtype(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return kernels::DType::f32;
    case at::kHalf:
      return kernels::DType::f16;
    case at::kBFloat16:
      return kernels::DType::bf16;
    case at::kDouble:
      return kernels::DType::f64;
    default:
      TORCH_CHECK(false, "girih: no kernel reads ", tensor.scalar_type());
  }
}

// 0 for a dimension of one element, whose stride is arbitrary.
inline int64_t stride_of(const Tensor& tensor, int64_t d) {
  return tensor.size(d) == 1 ? 0 : tensor.stride(d);
}

// An undefined tensor becomes an array without data.
template <int Rank>
kernels::InputTensor<Rank> input(const Tensor& tensor) {
  kernels::InputTensor<Rank> array;
  if (!tensor.defined()) return array;
  array.data = tensor.const_data_ptr();
  array.dtype = kernel_dtype(tensor);
  for (int d = 0; d < Rank; ++d) array.stride[d] = stride_of(tensor, d);
  return array;
}

template <int Rank>
kernels::InputTensor<Rank> input(const OptionalTensor& tensor) {
  return input<Rank>(tensor.value_or(Tensor()));
}

template <int Rank>
kernels::OutputTensor<Rank> output(const Tensor& tensor) {
  kernels::OutputTensor<Rank> array;
  if (!tensor.defined()) return array;
  array.data = tensor.mutable_data_ptr();
  array.dtype = kernel_dtype(tensor);
  for (int d = 0; d < Rank; ++d) array.stride[d] = stride_of(tensor, d);
  return array;
}

// cu_seqlens must be contiguous and outlive the launch.
inline kernels::SequenceLayout sequence_layout(const Tensor& x, const Tensor& cu_seqlens) {
  if (!cu_seqlens.defined()) return {x.size(0), x.size(1), x.size(0), nullptr, false, false};
  const bool has_bounds = cu_seqlens.dim() == 2;
  return {x.size(0),
          x.size(1),
          has_bounds ? x.size(0) : cu_seqlens.size(0) - 1,
          cu_seqlens.const_data_ptr(),
          cu_seqlens.scalar_type() == at::kLong,
          has_bounds};
}

inline Tensor contiguous_or_undefined(const OptionalTensor& tensor) {
  return is_defined(tensor) ? tensor->contiguous() : Tensor();
}

// The gradient of an output [B, T, heads, width] in `type`, with aligned rows; zeros if it is absent.
inline Tensor align_output_gradient(const OptionalTensor& gradient, const Tensor& q, int64_t heads,
                                    int64_t width, at::ScalarType type, int64_t multiple = 8) {
  if (is_defined(gradient)) return align_rows(gradient->to(type), multiple);
  return at::zeros({q.size(0), q.size(1), heads, (width + multiple - 1) / multiple * multiple},
                   q.options().dtype(type));
}

// Allocates [B, rows, heads, width] for the kernels to write. With cu_seqlens it is zeroed, since tokens
// outside of the sequences are not written.
inline Tensor new_rows(const Tensor& q, int64_t rows, const Tensor& cu_seqlens, int64_t heads, int64_t width,
                       at::ScalarType type) {
  const auto options = q.options().dtype(type);
  return cu_seqlens.defined() ? at::zeros({q.size(0), rows, heads, width}, options)
                              : at::empty({q.size(0), rows, heads, width}, options);
}

// Sums the partial gradients of the query heads of each group, [B, T, heads * group, padded width] to [B, T,
// heads, width], in the dtype of x.
inline Tensor sum_head_groups(const Tensor& partials, int64_t heads, int64_t width, const Tensor& x) {
  const auto group = partials.size(2) / heads;
  const auto all = group == 1 ? partials : partials.unflatten(2, {heads, group}).sum(3);
  return crop_width(all, width).to(x.scalar_type()).contiguous();
}

// A state zero-padded to [N, H, rows, cols]; `transposed`: `state` is [N, H, cols, rows].
inline Tensor pad_state(const OptionalTensor& state, bool transposed, int64_t rows, int64_t cols) {
  if (!is_defined(state)) return Tensor();
  const auto x = transposed ? state->mT() : *state;
  if (x.size(2) == rows && x.size(3) == cols) return x;
  return at::constant_pad_nd(x, {0, cols - x.size(3), 0, rows - x.size(2)});
}

// Removes the padding: [N, H, rows, cols], contiguous.
inline Tensor crop_state(const Tensor& padded, int64_t rows, int64_t cols) {
  return padded.narrow(-2, 0, rows).narrow(-1, 0, cols).contiguous();
}

// gradient() if the input is a tensor, else nullopt.
template <class Gradient>
OptionalTensor if_defined(const OptionalTensor& input, const Gradient& gradient) {
  return is_defined(input) ? OptionalTensor(gradient()) : std::nullopt;
}

inline void check_launch(std::string_view function, cudaError_t error) {
  if (error != cudaSuccess) kernels::clear_last_error();
  TORCH_CHECK(error == cudaSuccess, "girih: ", function,
              " could not be launched: ", cudaGetErrorString(error));
}

// The intermediate tensors of a plan, in memory of the caching allocator. The destructor returns the memory
// to the allocator, which reuses it in the order of the current stream.
class TensorWorkspace : public kernels::Workspace {
 public:
  explicit TensorWorkspace(const Tensor& device_of)
      : options_(at::TensorOptions(device_of.device()).dtype(at::kByte)) {}

 protected:
  void* allocate(int64_t rows, int64_t row_bytes, int64_t&) override {
    tensors_.push_back(at::empty({rows * row_bytes}, options_));
    return tensors_.back().mutable_data_ptr();
  }

 private:
  at::TensorOptions options_;
  std::vector<Tensor> tensors_;
};

// Runs the plan kernels::function(problem, workspace, stream) on the current stream, with a workspace on the
// device of `tensor`, which is the current device.
#define GIRIH_RUN(function, problem, tensor)                                                         \
  do {                                                                                               \
    ::girih::TensorWorkspace workspace(tensor);                                                      \
    ::girih::check_launch(#function,                                                                 \
                          kernels::function(problem, workspace, c10::cuda::getCurrentCUDAStream())); \
  } while (false)

// Launches kernels::function(arguments, stream) on the current stream.
#define GIRIH_LAUNCH(function, ...) \
  ::girih::check_launch(#function, kernels::function(__VA_ARGS__, c10::cuda::getCurrentCUDAStream()))
// Calls kernels::function(arguments), which queries the device and launches nothing.
#define GIRIH_QUERY(function, ...) ::girih::check_launch(#function, kernels::function(__VA_ARGS__))

// The path of a call on `device`: `fallback` if fits() is false, the ATen form without sequences.
template <class Fits>
Path restrict_path(const Path& path, const c10::SymInt& sequences, at::Device device, const Fits& fits,
                   Path (*fallback)(const char* reason)) {
  if (sequences == 0) return aten(kNoSequences);
  if (path == Path::Code::aten) return path;
  const c10::cuda::CUDAGuard guard(device);
  return fits() ? path : fallback(kSharedMemoryTooSmall);
}

}  // namespace girih
