// A tile of 64 keys and values, 16 rows for each warp, and its products with tiles of queries and of the
// gradients of their outputs:
//
//     P^T = e^{scale K Q^T - lse}    dV += P^T dO    dA^T = P^T * (V dO^T - delta)    dK += dA^T Q
#pragma once

#include "cat_attention/keys.cuh"
#include "cat_attention/launch.h"
#include "cat_attention/products.cuh"
#include "cat_attention/softmax.h"

namespace girih::kernels {

template <typename T, int Tile>
struct CatKeyTile {
  static constexpr int kQueries = kCatQueries<T, Tile>, kColumns = kCatColumns<Tile>,
                       kUnrolled = std::min(4, kCatUnrolled<T, Tile>);
  using KeyRows = SharedTile<T, kCatBlock, Tile>;
  using QueryRows = SharedTile<T, kQueries, Tile>;
  static constexpr int kStage = 2 * QueryRows::kBytes + kQueries * static_cast<int>(sizeof(CatQueryRecord));
  static constexpr int bytes(int stages) { return 2 * KeyRows::kBytes + stages * kStage; }

  const CatShape& shape;
  unsigned char* shared;
  int stages;
  float scale;  // multiplied by kCatUnit, as lse
  int column;   // first column of dk and dv
  Accumulator<kColumns / 8> dk, dv;

  __device__ CatKeyTile(const CatShape& shape, unsigned char* shared, int stages)
      : shape(shape), shared(shared), stages(stages), scale(shape.scale * kCatUnit<T>), column(0) {}

  __device__ KeyRows keys() const { return {reinterpret_cast<T*>(shared)}; }
  __device__ KeyRows values() const { return {reinterpret_cast<T*>(shared + KeyRows::kBytes)}; }
  __device__ unsigned char* stage(int n) const {
    return shared + 2 * KeyRows::kBytes + (stages == 1 ? 0 : n % 2 * kStage);
  }
  __device__ QueryRows queries(int n) const { return {reinterpret_cast<T*>(stage(n))}; }
  __device__ QueryRows gradients(int n) const { return {reinterpret_cast<T*>(stage(n) + QueryRows::kBytes)}; }
  __device__ const CatQueryRecord* query_records(int n) const {
    return reinterpret_cast<const CatQueryRecord*>(stage(n) + 2 * QueryRows::kBytes);
  }

  __device__ void begin() { fill(dk, 0.f), fill(dv, 0.f); }

  // Loads rows `row`, `row` + apart, ...
  __device__ void load_keys(const InputTensor<4>& k, const InputTensor<4>& v, int64_t batch, int64_t row,
                            int row_step, int rows, int head) const {
    load_async<kCatThreads>(keys(), row_of<T>(k, batch, row, head), row_step * k.stride[1], rows, shape.D,
                            threadIdx.x);
    load_async<kCatThreads>(values(), row_of<T>(v, batch, row, head), row_step * v.stride[1], rows, shape.V,
                            threadIdx.x);
  }
  // Loads the queries from `row`; rows past the last are zero.
  __device__ void load_queries(int n, const InputTensor<4>& q, const InputTensor<4>& dout,
                               const CatQueryRecord* all, int64_t batch, int row, int head) const {
    const int rows = min(kQueries, shape.rows - row);
    load_async<kCatThreads>(queries(n), row_of<T>(q, batch, row, head), q.stride[1], rows, shape.D,
                            threadIdx.x);
    load_async<kCatThreads>(gradients(n), row_of<T>(dout, batch, row, head), dout.stride[1], rows, shape.V,
                            threadIdx.x);
    const CatQueryRecord* from = all + (batch * shape.query_heads + head) * shape.rows + row;
    for (int i = threadIdx.x; i < kQueries; i += kCatThreads)
      copy_async(shared_address(query_records(n) + i), from + i, i < rows);
    commit_copies();
  }

  // Adds the terms of 8 N queries of tile n, from `first`, to dk and dv of the warp's 16 keys. mask(i, j,
  // query): whether query first + j attends to row lane_row() + 8 i.
  template <int N, class Mask>
  __device__ void add(int n, int first, const Mask& mask) {
    const int row = 16 * warp_index();
    Accumulator<N> p, da;
    fill(p, 0.f), fill(da, 0.f);
#pragma unroll kUnrolled
    for (int col = 0; col < Tile; col += 16) {
      CatAFragment<T> a;
      a.load(keys(), row, col);
      add_scores(p, a, queries(n), first, col);
    }
#pragma unroll kUnrolled
    for (int col = 0; col < Tile; col += 16) {
      CatAFragment<T> a;
      a.load(values(), row, col);
      add_scores(da, a, gradients(n), first, col);
    }
    for_each_register_pair<N>([&](int m, int j) {
      const int at = 8 * m + lane_col() + j;
      const CatQueryRecord query = query_records(n)[first + at];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float &weight = p.at[m][2 * i + j], &gradient = da.at[m][2 * i + j];
        weight = mask(i, at, query) ? cat_weight<T>(weight, scale, query.lse) : 0.f;
        gradient = weight * (gradient - query.delta);
      }
    });
    add_weight_product<T>(dv, p, gradients(n), first, column);
    add_weight_product<T>(dk, da, queries(n), first, column);
  }
};

}  // namespace girih::kernels
