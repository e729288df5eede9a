// What a chunk's tokens need of backward that no later chunk has a part in.
//
//     dr_t = A_t do_t of values        dy = J_f^T dr        dq_t = A_t^T dy_t of keys
// and of either memory, with l = dy and w = q of keys, l = r and w = do of values, what du is of reads in the
// chunk itself:  direct_i = sum over t >= i of e^{L_t - L_i} (w_t.x_i) l_t.
#pragma once

#include "trellis/chunk.cuh"

namespace girih::kernels {

enum RowTile : int { kRowQ, kRowK, kRowV, kRowA, kRowDo, kRowU, kRowR, kRowDy, kRowTiles };

template <typename T, int Tile>
__global__ void __launch_bounds__(128) trellis_rows_kernel(const __grid_constant__ TrellisRows p) {
  extern __shared__ __align__(128) unsigned char shared[];
  using Reader = TrellisChunk<T, Tile>;
  constexpr int N = Reader::N, K = Reader::K;
  const TrellisShape& shape = p.shape;
  Reader reader(shape, shared);
  const Columns& columns = reader.columns;

  const auto fetch = [&](int memory) {
    if (reader.resumed(p.first[memory])) {
      reader.load_first(p.first[memory], shape.width(memory));
    } else {
      reader.load_memory(p.memories[memory], shape.width(memory));
    }
    commit_copies();
  };
  reader.load(kRowV, p.x[1], shape.V);
  reader.load(kRowA, p.a, shape.M);
  fetch(1);
  reader.load(kRowDo, p.dout, shape.V);
  reader.load(kRowQ, p.q, shape.D);
  reader.load(kRowK, p.x[0], shape.D);
  commit_copies();
  reader.load_gates(p.gamma, p.g, kRowTiles);
  wait_copies<0>();
  __syncthreads();

  // Z, what its rows' sums come to, U; then A where it was A'.
  const auto updates = [&](int memory, int x) {
    Operand<K> left;
    reader.left(left, x);
    Sums<N> u, slope, a;
    reader.wide(a, kRowA);
    fill(u, 0.f);
    add_product_transposed<T>(u, left, reader.memory());
    // Backward takes z as it is stored, rounded: without a silu less the row's mean, of which rounding would
    // take its share, and of softmax phi(z). All that is made of it here is of the same.
    const auto rounded = [&](Sums<N>& z) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 back = unpaired<T>(pair_of<T>(z.at[n][2 * half], z.at[n][2 * half + 1]));
          z.at[n][2 * half] = back.x, z.at[n][2 * half + 1] = back.y;
        }
      }
      reader.store_out(p.left.z[memory], shape.M, z, kRowU);
    };
    const auto updated = [&](const auto& phi) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Fit found = reader.fit_of(phi, u, a, half);
        const int row = lane_row() + 8 * half;
        if (lane_col() == 0 && row < reader.rows) {
          float* to = row_of<float>(p.left.fit[memory], reader.batch(), reader.token() + row, reader.head);
          *reinterpret_cast<float4*>(to) = {found.mean, found.inverse, found.beta, found.mean_a};
        }
        to_residual(phi, u, slope, a, found, half, columns);
      }
    };
    with_map(shape.phi, shape.slots, [&](const auto& phi) {
      if constexpr (phi.softmax) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          to_image(phi, u, reader.fit_of(phi, u, a, half), half, columns);
        }
        rounded(u);
        fill(slope, 1.f);
        updated(Map<true, true>(shape.phi, shape.slots));
      } else {
        if (!phi.silu && phi.centre > 0.f) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float mean = moments_of(phi, u, a, half, columns).x;
#pragma unroll
            for (int n = 0; n < N; ++n) {
#pragma unroll
              for (int i = 2 * half; i < 2 * half + 2; ++i) {
                u.at[n][i] = columns.has(n, i) ? u.at[n][i] - mean : 0.f;
              }
            }
          }
        }
        rounded(u);
        activate(phi, u, slope);
        updated(phi);
      }
    });
    reader.store_out(p.left.u[memory], shape.M, u, kRowU);
    if (p.first[memory].data != nullptr) {
      __syncthreads();
      if (reader.resumed(p.first[memory])) reader.load_memory(p.memories[memory], shape.width(memory));
      commit_copies();
      wait_copies<0>();
    }
    __syncthreads();
  };

  // dR
  Operand<K> w;
  Sums<N> dr;
  updates(1, kRowV);
  reader.left(w, kRowDo);
  reader.read(dr, w, kRowV, kRowU);
  __syncthreads();

  // Y, r = f(Y), dY = J_f^T dR
  fetch(0);
  wait_copies<0>();
  __syncthreads();
  updates(0, kRowK);
  Sums<N> y, slope;
  reader.left(w, kRowQ);
  reader.read(y, w, kRowK, kRowU);
  with_map(shape.f, shape.slots, [&](const auto& f) {
    activate(f, y, slope);
    Fit found[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      found[half] = reader.fit_of(f, y, y, half);
      to_transposed_product(f, dr, y, slope, found[half], half, columns);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) to_image(f, y, found[half], half, columns);
  });
  round_to<T>(w, y);
  store_blocks(reader.own(kRowR), 0, 0, w);
  reader.store(kRowDy, dr);
  __syncwarp();
  reader.put_rows(p.left.l[1], shape.M, kRowR);
  reader.put_rows(p.left.l[0], shape.M, kRowDy);

  // dQ
  Operand<K> dy;
  round_to<T>(dy, dr);
  reader.read_transposed(y, dy, kRowU, kRowK);
  reader.store_out(p.dq, shape.D, y, kRowA);
  __syncthreads();

  // direct
  const auto L = reader.own_through();
  const auto direct = [&](int memory, int x, int of_w, int of_l) {
    reader.left(w, x);
    fill(y, 0.f);
    reader.add_scored(y, w, of_w, of_l, reader.tile, reader.block.tiles,
                      [&](Sums<2>& s, int j) { reader.weigh_later(s, j, L); });
    reader.store_out(p.left.direct[memory], shape.M, y, kRowA);
  };
  direct(0, kRowK, kRowQ, kRowDy);
  direct(1, kRowV, kRowDo, kRowR);
}

template <typename T, int Tile>
cudaError_t launch_trellis_rows(const TrellisRows& p, cudaStream_t stream) {
  return launch_chunks<trellis_rows_kernel<T, Tile>, T, Tile>(p, kRowTiles, stream);
}

}  // namespace girih::kernels
