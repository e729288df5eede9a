// Short convolution: depthwise and causal, with an optional SiLU.
//
//     z_t = bias + sum_j weight_j x_{t - (W-1) + j}        j = 0..W-1; tap W-1 is the current token
//     y_t = z_t  or  silu(z_t)
//
// The state of a sequence is its W - 1 inputs before the first token (zero without a state). x, y, states and
// their gradients have one type (fp32, fp16 or bf16); weight and bias may have other types. All arithmetic is
// fp32. Results are deterministic.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tile/array.h"
#include "tile/sequence.h"
#include "tile/workspace.h"

namespace girih::kernels {

constexpr int kShortConvMaxWidth = 4;

struct ShortConvShape {
  SequenceLayout tokens;
  int64_t channels;
  int width;  // W, 1..4
  bool silu;
  DType dtype;  // of x, y, states and their gradients
};

struct ShortConvForward {
  ShortConvShape shape;
  InputTensor<3> x;             // [B, T, channels]
  InputTensor<2> weight;        // [channels, W]
  InputTensor<1> bias;          // [channels], optional
  InputTensor<3> state;         // [N, W-1, channels], optional
  OutputTensor<3> y;            // [B, T, channels]
  OutputTensor<3> final_state;  // [N, W-1, channels]
};

struct ShortConvBackward {
  ShortConvShape shape;
  InputTensor<3> dy;            // [B, T, channels], optional: zero
  InputTensor<3> dfinal_state;  // [N, W-1, channels], optional: zero
  InputTensor<3> x;
  InputTensor<2> weight;
  InputTensor<1> bias;
  InputTensor<3> state;
  OutputTensor<3> dx;       // [B, T, channels]
  OutputTensor<2> dweight;  // [channels, W]
  OutputTensor<1> dbias;    // [channels]; absent if bias is absent
  OutputTensor<3> dstate;   // [N, W-1, channels]; absent if state is absent
};

// One token, T = 1. The state is shifted in place.
struct ShortConvStep {
  ShortConvShape shape;
  InputTensor<3> x;  // [B, 1, channels]
  InputTensor<2> weight;
  InputTensor<1> bias;
  OutputTensor<3> state;  // [B, W-1, channels]
  OutputTensor<3> y;      // [B, 1, channels]
};

cudaError_t short_conv_forward(const ShortConvForward& problem, cudaStream_t stream);
cudaError_t short_conv_backward(const ShortConvBackward& problem, Workspace& workspace, cudaStream_t stream);
cudaError_t short_conv_step(const ShortConvStep& problem, cudaStream_t stream);

}  // namespace girih::kernels
