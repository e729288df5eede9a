// The state in the registers of a warp of the fp32 scan: sixteen columns of V, half of D.
#pragma once

#include "delta_product/fp32_tiles.cuh"
#include "tile/tf32.h"

namespace girih::kernels::delta_product::fp32_scan {

// Rows 8 n + lane_col() + j of a tile, the lane's two columns of V: at[n][2 h + j].
using TileFragment = Accumulator<2>;

template <int Width>
struct WarpState {
  static constexpr int kBlocks = Width / 16 / kParts;  // blocks of sixteen columns of D
  using Rows = RowTile<Width>;

  const DeltaFp32Scan& p;
  const DeltaFp32Shape& shape;
  const HeadWork& work;
  const int part, first_col;  // half of D; its first column
  const int block_col, col;   // first of the lane's columns, in the block and in V; the second is 8 further
  // S^T or dS^T: columns 4 (lane % 4) + 2 j + i of block m are at[2 m + i][2 h + j], in row `col` + 8 h of V.
  Accumulator<2 * kBlocks> s;

  __device__ WarpState(const DeltaFp32Scan& p, const HeadWork& work, int first_block_col, int warp)
      : p(p),
        shape(p.shape),
        work(work),
        part(warp % kParts),
        first_col(part * 16 * kBlocks),
        block_col(warp / kParts * kGroupColumns + lane_row()),
        col(first_block_col + block_col) {}

  // Calls f(element, reference) for the lane's elements that exist, in an array of states.
  template <class T, class F>
  __device__ void for_each_element(T* data, const int64_t (&stride)[4], const F& f) {
    const int row = first_col + 2 * lane_col();
    data += work.sequence.index * stride[0] + work.head * stride[1] + row * stride[2] + col * stride[3];
    for_each_register<2 * kBlocks>([&](int n, int e) {
      const int down = n / 2 * 16 + e % 2 * 2 + n % 2, right = e / 2 * 8;
      if (row + down < shape.D && col + right < shape.V) {
        f(s.at[n][e], data[down * stride[2] + right * stride[3]]);
      }
    });
  }
  __device__ void load() {
    fill(s, 0.f);
    if (p.initial.data == nullptr) return;
    for_each_element(static_cast<const float*>(p.initial.data), p.initial.stride,
                     [](float& s, const float& at) { s = at; });
  }
  __device__ void store() {
    for_each_element(static_cast<float*>(p.final.data), p.final.stride,
                     [](float element, float& stored) { stored = element; });
  }
  // Calls f(pointer to a pack, its four elements) for the lane's packs of a saved state [V, D].
  template <class Float, class F>
  __device__ void for_each_saved_pack(Float* states, int64_t number, const F& f) {
    const int D = round_up_to_4(shape.D), row = first_col + 2 * lane_col();
    Float* const from = states + ((number * shape.heads + work.head) * shape.V + col) * D + row;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int m = 0; m < kBlocks; ++m) {
        if (col + 8 * h >= shape.V || row + 16 * m >= D) continue;
        f(from + 8 * h * D + 16 * m, s.at[2 * m][2 * h], s.at[2 * m + 1][2 * h], s.at[2 * m][2 * h + 1],
          s.at[2 * m + 1][2 * h + 1]);
      }
    }
  }
  __device__ void save_state(int64_t number) {
    if (p.saved_states == nullptr) return;
    for_each_saved_pack(p.saved_states, number, [](float* at, float x, float y, float z, float w) {
      *reinterpret_cast<float4*>(at) = {x, y, z, w};
    });
  }
  // dS <- phi'(S) * dS, S before the function
  __device__ void apply_slope(int64_t number) {
    const Between which = shape.segments.between;
    for_each_saved_pack(p.states, number, [&](const float* at, float& x, float& y, float& z, float& w) {
      const float4 before = *reinterpret_cast<const float4*>(at);
      x *= phi_derivative(which, before.x), y *= phi_derivative(which, before.y);
      z *= phi_derivative(which, before.z), w *= phi_derivative(which, before.w);
    });
  }
  template <class F>
  __device__ void each(const F& f) {
    for_each_register<2 * kBlocks>([&](int n, int e) { f(s.at[n][e]); });
  }
  // S <- phi(S)
  __device__ void apply_between() {
    each([&](float& x) { x = phi(shape.segments.between, x); });
  }
  __device__ void decay(const TileMatrices& matrices) {
    if (p.g.data == nullptr) return;
    const float by = matrices.decay_total;
    each([&](float& x) { x *= by; });
  }
  // Called at the first tile of a segment.
  template <bool Reverse>
  __device__ void start_segment(const TileIterator<Reverse>& tile_iterator) {
    const bool has = shape.segments.between != Between::none;
    if (Reverse && has && tile_iterator.position.completes_chunk(shape.segments))
      apply_slope(tile_iterator.position.index + 1);
    save_state(tile_iterator.position.index);
    if (!Reverse && has && tile_iterator.position.part == 0 && tile_iterator.token > 0) apply_between();
  }

  // sums[i] = S^T x_i^T over this half of D. S is split into tf32 parts once for all x_i.
  template <int N>
  __device__ void read(TileFragment (&sums)[N], const Rows (&x)[N]) const {
    SplitAccumulator<2 * N> all;
    add_read<true>(all, x, 0);
#pragma unroll
    for (int m = 1; m < kBlocks; ++m) add_read<false>(all, x, m);
#pragma unroll
    for (int i = 0; i < N; ++i) all.put(sums[i].at, 2 * i);
  }
  // S^T += y^T x
  __device__ void add_update(const TileFragment& y, const Rows& x) {
    SplitAFragment block;
    block.take(y, 0);
#pragma unroll
    for (int m = 0; m < kBlocks; m += 2) {
      float right[4][4];
      for_each_register<2>([&](int n, int i) {
        const float2 two = *reinterpret_cast<const float2*>(
            &x.at(i / 2 * 8, first_col + 16 * (m + n), lane_col() + i % 2, 2 * lane_row()));
        right[2 * n][i] = two.x, right[2 * n + 1][i] = two.y;
      });
      SplitAccumulator<4> sums;
      sums.template add<true>(block, right);
      for_each_register<4>([&](int n, int e) { s.at[2 * m + n][e] += sums.at(n, e); });
    }
  }

 private:
  template <bool First, int N>
  __device__ void add_read(SplitAccumulator<2 * N>& sums, const Rows (&x)[N], int m) const {
    SplitAFragment block;
    block.take(s, 2 * m);
    float right[2 * N][4];
#pragma unroll
    for (int n = 0; n < 2 * N; ++n) {
      // The lane's four elements in the order of S.
      const float4 four = *reinterpret_cast<const float4*>(
          &x[n / 2].at(n % 2 * 8, first_col + 16 * m, lane_row(), 2 * lane_col()));
      right[n][0] = four.x, right[n][1] = four.z, right[n][2] = four.y, right[n][3] = four.w;
    }
    sums.template add<First>(block, right);
  }
};

__device__ inline void load_values(TileFragment& y, const float* values, int block_col) {
  for_each_register<2>([&](int n, int e) {
    y.at[n][e] = values[(8 * n + lane_col() + e % 2) * kValuePitch + block_col + e / 2 * 8];
  });
}
// y -= x
__device__ inline void subtract(TileFragment& y, const TileFragment& x) {
  for_each_register<2>([&](int n, int e) { y.at[n][e] -= x.at[n][e]; });
}
// Multiplies the rows of y by factors and by `by`.
__device__ inline void scale_tile(TileFragment& y, const float (&factors)[kRows], float by = 1.f) {
  scale_columns(y, [&](int n) {
    const float2 two = *reinterpret_cast<const float2*>(&factors[8 * n + lane_col()]);
    return float2{by * two.x, by * two.y};
  });
}
// X y
__device__ inline TileFragment multiply_inverse(const TileFragment& y, const TileMatrices& matrices) {
  SplitAFragment block;
  block.take(y, 0);
  float sums[2][4] = {}, low[2][4] = {};
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    uint32_t x[kInverseParts][4];
#pragma unroll
    for (int part = 0; part < kInverseParts; ++part) {
      load_four(x[part], &matrices.x[part][8 * n + lane_row()][2 * lane_col()]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto product = [&](float(&d)[4], const uint32_t(&left)[4], int part) {
        mma_tf32(d, left, x[part][2 * i], x[part][2 * i + 1]);
      };
      product(low[n], block.high[i], 2), product(low[n], block.low[i], 1);
      product(low[n], block.low[i], 0), product(low[n], block.high[i], 1);
      product(sums[n], block.high[i], 0);
    }
  }
  TileFragment solved;
  for_each_register<2>([&](int n, int i) { solved.at[n][i] = sums[n][i] + low[n][i]; });
  return solved;
}
// P y
__device__ inline SplitAccumulator<2> multiply_scores(const TileFragment& y,
                                                      const float (&p_matrix)[kRows][kRows]) {
  SplitAFragment block;
  block.take(y, 0);
  float right[2][4];
#pragma unroll
  for (int n = 0; n < 2; ++n) load_four(right[n], &p_matrix[8 * n + lane_row()][2 * lane_col()]);
  SplitAccumulator<2> sums;
  sums.add<true>(block, right);
  return sums;
}
__device__ inline void add(TileFragment& y, const SplitAccumulator<2>& sums) {
  for_each_register<2>([&](int n, int e) { y.at[n][e] += sums.at(n, e); });
}
// Stores the lane's rows: row i to to(i) at column `col`, if has(i).
template <class To, class Has>
__device__ inline void store_tile(const TileFragment& y, int col, int cols, const To& to, const Has& has) {
  const bool inside = col < cols, both = col + 8 < cols;
  for_each_register_pair<2>([&](int n, int j) {
    float* const row = to(8 * n + j);
    const bool exists = has(8 * n + j);
    if (exists && inside) row[0] = y.at[n][j];
    if (exists && both) row[8] = y.at[n][2 + j];
  });
}
// Rows of steps. `segment` points to the first row of the segment; the tile has `rows` rows from row `first`
// on.
__device__ inline void store_steps(const TileFragment& y, float* segment, int stride, int first, int rows,
                                   int col, int cols) {
  first += lane_col();
  const int left = rows - lane_col();
  store_tile(
      y, col, cols, [&](int i) { return segment + (first + i) * stride; }, [&](int i) { return i < left; });
}
// Rows of tokens, of those rows of the tile that end a token. `segment` points to the first token of the
// segment.
__device__ inline void store_tokens(const TileFragment& y, float* segment, int stride,
                                    const TileMatrices& matrices, int col, int cols) {
  const int* const token = matrices.token + lane_col();
  store_tile(
      y, col, cols, [&](int i) { return segment + token[i] * stride; }, [&](int i) { return token[i] >= 0; });
}

}  // namespace girih::kernels::delta_product::fp32_scan
