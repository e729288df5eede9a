// What a chunk's tokens get of the memories' gradients. Of either memory, with G that of A after the chunk
// and E_ti = e^{L_t - L_i},
//
//     c_i  = e^{L_C - L_i} (u_i G) + sum over t >= i of E_ti (u_i.l_t) w_t
//     dx_i = -gamma_i c_i + dz_i A'        dgamma_i = -x_i.c_i        da_i = -J du_i
// A gate is in what is read after it of what was there before it: dg_j is the sum of
//     e^{L_t} l_t^T A w_t                                 t >= j
//     pair_ti = -gamma_i E_ti (w_t.x_i) (l_t.u_i)         i < j <= t
//     end_i   = -gamma_i e^{L_C - L_i} x_i.(u_i G)        i < j,      and of e^{L_C} <G, A>.
// Summed from the end, a pair is added at t and taken off at i as the same number, so that it cancels where
// it should.
#pragma once

#include "trellis/chunk.cuh"

namespace girih::kernels {

enum ColumnTile : int { kColumnX, kColumnW, kColumnL, kColumnU, kColumnDz, kColumnTiles };

template <typename T, int Tile>
struct TrellisColumnPass {
  using Reader = TrellisChunk<T, Tile>;
  static constexpr int N = Reader::N, K = Reader::K;
  const TrellisColumns& p;
  Reader& reader;
  float whole;              // L_C
  float2 dgamma{0.f, 0.f};  // of the quad's rows
  float2 dL{0.f, 0.f};      // likewise, what is of the rows themselves
  float end = 0.f;          // the lane's share in what the end of the chunk has of dL

  // The dot of every row with the warp's tile `which`: all four lanes get it.
  __device__ float2 dots(const Sums<N>& sums, int which) const {
    float2 dot{0.f, 0.f};
#pragma unroll
    for (int k = 0; k < K; ++k) {
      Sums<2> x;
      load_wide<T>(x, reader.own(which), 0, 16 * k);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          dot.x = fmaf(x.at[n][i], sums.at[2 * k + n][i], dot.x);
          dot.y = fmaf(x.at[n][2 + i], sums.at[2 * k + n][2 + i], dot.y);
        }
      }
    }
    return {sum_over_row(dot.x), sum_over_row(dot.y)};
  }

  // The lane's share in <G, A>, the trace of G A^T: blocks of 16 slots are the chunk's warps' in turn.
  __device__ float product_of_states() const {
    float sum = 0.f;
    for (int m = reader.tile * 16; m < p.shape.M; m += 16 * reader.block.tiles) {
      Sums<2> block;
      fill(block, 0.f);
#pragma unroll
      for (int k = 0; k < K; ++k) {
        uint32_t g[4];
        load_block(g, reader.memory(1), m, 16 * k);
        add_product_transposed<T>(block, g, reader.memory(), m, 16 * k);
      }
      // Rows lane_row() and 8 further, of columns 8 n + lane_col() and the next.
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (lane_col() + i == lane_row()) sum += block.at[0][i] + block.at[1][2 + i];
      }
    }
    return sum;
  }

  // Pairs of the warp's rows i with tile j's t, of the weighed scores E (u_i.l_t): taken off at i, and added
  // up at t in the place of this tile's.
  __device__ void pairs(const Sums<2>& weighed, const Operand<K>& x, int j, float2 gamma, bool first) {
    Sums<2> pair;
    fill(pair, 0.f);
    add_product_transposed<T>(pair, x, reader.rows_of(kColumnW, j));
    float taken[2] = {0.f, 0.f};
    float* kept = reader.kept + reader.tile * reader.block.rows() + j * kTile;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float at_t[2] = {0.f, 0.f};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int t = j * kTile + 8 * n + lane_col() + (e & 1),
                  i = reader.tile * kTile + lane_row() + (e >> 1) * 8;
        const float value = i < t ? -(e < 2 ? gamma.x : gamma.y) * weighed.at[n][e] * pair.at[n][e] : 0.f;
        taken[e >> 1] += value, at_t[e & 1] += value;
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float sum = sum_over_col(at_t[e]);
        float& place = kept[8 * n + lane_col() + e];
        if (lane_row() == 0) place = first ? sum : place + sum;
      }
    }
    dL.x -= sum_over_row(taken[0]), dL.y -= sum_over_row(taken[1]);
  }

  __device__ void run(int memory) {
    const int width = p.shape.width(memory);
    const bool gated = p.dg.data != nullptr;
    reader.load(kColumnDz, p.dz[memory], p.shape.M);
    reader.load(kColumnL, p.l[memory], p.shape.M);
    reader.load(kColumnW, p.w[memory], width);
    if (reader.resumed(p.first[memory])) {
      reader.load_first(p.first[memory], width);
    } else {
      reader.load_memory(p.memories[memory], width);
    }
    commit_copies();
    reader.load(kColumnX, p.x[memory], width);
    reader.load(kColumnU, p.u[memory], p.shape.M);
    reader.load_memory(p.gradients[memory], width, 1);
    commit_copies();
    wait_copies<1>();
    __syncthreads();

    // dZ A'
    Operand<K> left;
    Sums<N> dx;
    fill(dx, 0.f);
    reader.left(left, kColumnDz);
    add_product<T>(dx, left, reader.memory());
    if (gated && p.first[memory].data != nullptr) {
      // A where it was A'
      __syncthreads();
      if (reader.resumed(p.first[memory])) reader.load_memory(p.memories[memory], width);
      commit_copies();
    }
    wait_copies<0>();
    __syncthreads();
    if (gated) {
      // e^{L_t} l_t^T A w_t
      Sums<N> read;
      fill(read, 0.f);
      reader.left(left, kColumnL);
      add_product<T>(read, left, reader.memory());
      const float2 dot = dots(read, kColumnW), L = reader.of_rows(reader.through);
      dL.x = fmaf(exp2_fast(L.x), dot.x, dL.x), dL.y = fmaf(exp2_fast(L.y), dot.y, dL.y);
      end += exp2_fast(whole) * product_of_states();
    }

    // c
    Sums<N> c;
    fill(c, 0.f);
    reader.left(left, kColumnU);
    add_product<T>(c, left, reader.memory(1));
    const auto L = reader.own_through();
    const float2 after = reader.of_rows(reader.after), gamma = reader.of_rows(reader.gamma);
    scale_rows(c, {exp2_fast(after.x), exp2_fast(after.y)});
    Operand<K> x;
    if (gated) {
      reader.left(x, kColumnX);
      const float2 dot = dots(c, kColumnX);
      dL.x = fmaf(gamma.x, dot.x, dL.x), dL.y = fmaf(gamma.y, dot.y, dL.y);
      // All four lanes of a row have its dot: one counts.
      if (lane_col() == 0) end -= gamma.x * dot.x + gamma.y * dot.y;
    }
    for (int j = reader.tile; j < reader.block.tiles; ++j) {
      add_scored<T>(c, left, reader.rows_of(kColumnL, j), reader.rows_of(kColumnW, j), [&](Sums<2>& s) {
        weigh_later(s, L, reader.gates_of(j), j == reader.tile, reader.rows_in(j));
        if (gated) pairs(s, x, j, gamma, memory == 0);
      });
    }
    const float2 dot = dots(c, kColumnX);
    dgamma.x -= dot.x, dgamma.y -= dot.y;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) dx.at[n][i] = fmaf(i < 2 ? -gamma.x : -gamma.y, c.at[n][i], dx.at[n][i]);
    }
    // dZ is the warp's own.
    reader.store_out(p.dx[memory], width, dx, kColumnDz);
    __syncthreads();
  }

  // da: minus the sum of both memories' J du, 8 slots a lane.
  __device__ void targets() const {
    const int packs = p.shape.M / 8;
    for (int i = lane(); i < reader.rows * packs; i += 32) {
      const int row = i / packs, m = i % packs * 8;
      const auto place = [&](const auto& x) {
        return offset_of(x, reader.batch(), reader.token() + row, reader.head) + m;
      };
      auto sum = kernels::load<8>(static_cast<const T*>(p.jdu[0].data) + place(p.jdu[0]));
      const auto other = kernels::load<8>(static_cast<const T*>(p.jdu[1].data) + place(p.jdu[1]));
#pragma unroll
      for (int e = 0; e < 8; ++e) sum.at[e] = -(sum.at[e] + other.at[e]);
      kernels::store<8>(static_cast<T*>(p.da.data) + place(p.da), sum);
    }
  }

  // dgamma, and dg of all that has been added up.
  __device__ void numbers() {
    const auto place = [&](const auto& tensor, int token) {
      return offset_of(tensor, reader.batch(), reader.chunk.start + token, reader.head);
    };
    if (lane_col() == 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = lane_row() + 8 * half, t = reader.tile * kTile + row;
        if (row >= reader.rows) continue;
        static_cast<float*>(p.dgamma.data)[place(p.dgamma, t)] = half == 0 ? dgamma.x : dgamma.y;
        // The chunk's gammas have been read: their place takes the rows' own part of dL.
        reader.gamma[t] = half == 0 ? dL.x : dL.y;
      }
    }
    if (p.dg.data == nullptr) return;
    end = sum_over_col(sum_over_row(end));
    if (lane() == 0) reader.after[reader.tile * kTile] = end;
    __syncthreads();
    if (reader.tile > 0) return;
    float at_end = 0.f, of[2];
    for (int j = 0; j < reader.block.tiles; ++j) at_end += reader.after[j * kTile];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int t = 2 * lane() + i;
      of[i] = 0.f;
      if (t >= reader.chunk.length) continue;
      of[i] = reader.gamma[t];
      for (int j = 0; j <= t / kTile; ++j) of[i] += reader.kept[j * reader.block.rows() + t];
      if (t == reader.chunk.length - 1) of[i] += at_end;
    }
    const float beyond = sum_after(of[0] + of[1]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int t = 2 * lane() + i;
      if (t >= reader.chunk.length) continue;
      static_cast<float*>(p.dg.data)[place(p.dg, t)] = beyond + of[1] + (i == 0 ? of[0] : 0.f);
    }
  }
};

template <typename T, int Tile>
__global__ void __launch_bounds__(128) trellis_columns_kernel(const __grid_constant__ TrellisColumns p) {
  extern __shared__ __align__(128) unsigned char shared[];
  TrellisChunk<T, Tile> reader(p.shape, shared, 2);
  const float whole = reader.load_gates(p.gamma, p.g, kColumnTiles);
  TrellisColumnPass<T, Tile> pass{p, reader, whole};
  pass.run(0);
  pass.run(1);
  pass.targets();
  pass.numbers();
}

template <typename T, int Tile>
cudaError_t launch_trellis_columns(const TrellisColumns& p, cudaStream_t stream) {
  return launch_chunks<trellis_columns_kernel<T, Tile>, T, Tile>(p, 2, kColumnTiles, stream);
}

}  // namespace girih::kernels
