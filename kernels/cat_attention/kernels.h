// The kernels that a call of cat_attention launches (cat_attention.cu), and their arguments. sm90/launch.h
// has the warpgroup kernels. Each launch function is compiled in its own file for each element type.
#pragma once

#include "cat_attention/cat_attention.h"

namespace girih::kernels {

// The record of a query for backward. The query attends to the headers from `first` to before `chunk`, its
// own chunk.
struct CatQueryRecord {
  float lse, delta;  // lse times kCatUnit (softmax.h)
  int first, chunk;
};

struct CatQueryGradients {
  CatShape shape;
  InputTensor<4> q, k, v, o, dout;
  InputTensor<3> lse;
  OutputTensor<4> dq;
  CatQueryRecord* queries;  // [B, HQ, T], output
  OutputTensor<4> dk, dv;   // output, if cat_has_fused_own_gradients(): rows other than headers
  float* partials;          // output, if cat_has_fused_own_gradients(): shares of headers
};

struct CatHeaderGradients {
  CatShape shape;
  InputTensor<4> q, k, v, dout;
  const CatQueryRecord* queries;
  float* partials;  // output
};

struct CatOwnGradients {
  CatShape shape;
  InputTensor<4> q, k, v, dout;
  const CatQueryRecord* queries;
  const float* partials;
  OutputTensor<4> dk, dv;
  bool is_sm90;  // whether the partials are from the warpgroup kernel
};

template <typename T, int Tile>
cudaError_t launch_cat_forward(const CatForward& problem, cudaStream_t stream);
template <typename T, int Tile>
cudaError_t launch_cat_query_gradients(const CatQueryGradients& problem, cudaStream_t stream);
template <typename T, int Tile>
cudaError_t launch_cat_header_gradients(const CatHeaderGradients& problem, cudaStream_t stream);
template <typename T, int Tile>
cudaError_t launch_cat_own_gradients(const CatOwnGradients& problem, cudaStream_t stream);

}  // namespace girih::kernels
