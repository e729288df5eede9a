// A block of the scan: its part of the state, and the steps for a chunk.
#pragma once

#include "gsa/chunk_gates.cuh"
#include "gsa/scan_stage.cuh"
#include "tile/places.h"

namespace girih::kernels::gsa {

constexpr int kBlocks = kChunk / kRows;
// First row of a block of 16 tokens, in the order in which gates are summed: from the end of the chunk at
// which the state is needed.
template <bool Reverse>
__device__ constexpr int block_row(int block) {
  return kRows * (Reverse ? block : kBlocks - 1 - block);
}

// For 8 columns of a chunk: total = L_C, and in forward weight = e^{sum of the gates after a token}, one
// block of 16 rows after the other.
template <bool Reverse, class Tile>
__device__ inline void weigh(Sums<kBlocks>& weight, Sums<1>& total, const Tile& g, int col) {
  uint32_t triangle[4], square[4];
  ones(triangle, Sum::after);
  ones(square, Sum::all);
  fill(total, 0.f);
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    GateParts<1> gates;
    load(gates, g, block_row<Reverse>(block), col);
    Sums<1> sums = total;
    add_gates(total, square, gates);
    if constexpr (Reverse) continue;
    add_gates(sums, triangle, gates);
#pragma unroll
    for (int i = 0; i < 4; ++i) weight.at[block][i] = exp2_fast(sums.at[0][i] * kLog2E);
  }
}

// The same columns of s as pairs of T, in forward; computed from the gates if s is absent.
template <typename T, class Stage>
__device__ inline void load_s(uint32_t (&s)[kBlocks][2], const Stage& stage, int col, bool has_s) {
  const auto for_each_pair = [&](auto f) {
#pragma unroll
    for (int i = 0; i < 2 * kBlocks; ++i) {
      s[i / 2][i % 2] = f(block_row<false>(i / 2) + i % 2 * 8);
    }
  };
  if (has_s) {
    for_each_pair([&](int row) { return *reinterpret_cast<const uint32_t*>(&lane_at(stage.s(), row, col)); });
  } else {
    for_each_pair([&](int row) {
      const float2 gates = *reinterpret_cast<const float2*>(&lane_at(stage.g(), row, col));
      return pair_of<T>(complement(gates.x), complement(gates.y));
    });
  }
}

template <typename T, int Slabs, int Slots, bool Reverse>
struct ScanBlock {
  using Stage = gsa::Stage<T, Slabs, Slots>;
  static constexpr int kN = Slots / 8;
  static constexpr int kPacks = Slots / 8;  // 16-byte packs of a row of a stored state
  static constexpr int kOwn = kN / kWarps;  // tiles of 8 columns whose gates the warp sums
  using Rounded = uint32_t[Slabs][kN][2];

  const ScanPass& pass;
  const GatedScan& p;
  Carried<Slabs, Slots>& carried;
  const int thread, warpgroup, warp;
  const bool alone;
  // The block's part of the state.
  int group, head, col, cols;
  int64_t number;  // index of the sequence or segment
  Slab slab[Slabs];
  Walk<Reverse> walk;
  // The thread's packs of a stored state, and their addresses.
  int pack_row, pack_col;
  int64_t chunk_stride, first_chunk;
  T* states[Slabs];
  Sums<kN> u[Slabs];

  __device__ ScanBlock(const ScanPass& pass, char* shared)
      : pass(pass),
        p(pass.scan),
        carried(*reinterpret_cast<Carried<Slabs, Slots>*>(shared)),
        thread(threadIdx.x % kWarpgroup),
        warpgroup(threadIdx.x / kWarpgroup),
        warp(thread / 32),
        alone(pass.cut.decay != nullptr) {}

  // Maps the block index to the block's work. Returns false if there is none.
  __device__ bool find();
  __device__ void find_states();
  template <class Array, class F>
  __device__ void for_each_element(const Array& array, int64_t index, const F& f) const;
  __device__ void begin_state() const;
  __device__ void weigh_chunk(const Stage& stage, bool has_s, bool first) const;
  __device__ void add_chunk(const Stage& stage);
  __device__ void carry(const Stage& stage, int turn, bool after_it, unsigned& parity, Rounded& before);
  __device__ void publish(const Stage& stage, int turn, const Rounded& before) const;
  __device__ void end() const;

  // The thread's float4 elements of the state: two rows of one slab, columns 8n + lane_col() and the next.
  __device__ float4* state() const { return reinterpret_cast<float4*>(carried.state) + thread; }
  // Barrier of the warpgroup.
  __device__ void meet() const { barrier_wait(1 + warpgroup, kWarpgroup); }
};

template <typename T, int Slabs, int Slots, bool Reverse>
__device__ inline bool ScanBlock<T, Slabs, Slots, Reverse>::find() {
  const unsigned tiles = (p.M + Slots - 1) / Slots, groups = slab_groups(pass, Slabs);
  unsigned job = blockIdx.x;
  col = static_cast<int>(job % tiles) * Slots;
  job /= tiles;
  group = static_cast<int>(job % groups);
  job /= groups;
  head = static_cast<int>(job % p.heads);
  number = job / p.heads;
  cols = min(Slots, p.M - col);
#pragma unroll
  for (int i = 0; i < Slabs; ++i) slab[i] = slab_at(pass, Slabs, group, i);
  return walk.find(p.tokens, pass.cut.tokens, number, alone);
}

// Calls f(element, its address in global memory) for the thread's elements inside of an array of states;
// array(memory) returns the array of a memory.
template <typename T, int Slabs, int Slots, bool Reverse>
template <class Array, class F>
__device__ inline void ScanBlock<T, Slabs, Slots, Reverse>::for_each_element(const Array& array,
                                                                             int64_t index,
                                                                             const F& f) const {
  using Place = std::conditional_t<std::is_same_v<decltype(array(0)), const In<4>&>, const float, float>;
#pragma unroll 1
  for (int i = 0; i < Slabs; ++i) {
    const Slab here = i == 0 ? slab[0] : slab[Slabs - 1];
    const auto& of = array(here.memory);
    if (of.data == nullptr) continue;
    float4* const elements = state() + i * kN * kWarpgroup;
    for_each_place<kN, 4>(
        [&](int n) -> float(&)[4] { return reinterpret_cast<float(&)[4]>(elements[n * kWarpgroup]); },
        kRows* warp + lane_row(), here.cols, lane_col(), cols,
        static_cast<Place*>(of.data) + index * of.stride[0] + head * of.stride[1] + here.col * of.stride[2] +
            col * of.stride[3],
        of.stride[2], of.stride[3], f);
  }
}

// Only warpgroup 0 loads the initial state: it has the first chunk, so no other thread reads these elements
// before.
template <typename T, int Slabs, int Slots, bool Reverse>
__device__ inline void ScanBlock<T, Slabs, Slots, Reverse>::begin_state() const {
  if (warpgroup != 0) return;
#pragma unroll
  for (int i = 0; i < Slabs * kN; ++i) state()[i * kWarpgroup] = make_float4(0.f, 0.f, 0.f, 0.f);
  for_each_element([&](int memory) -> const In<4>& { return p.memory[memory].initial; },
                   pass.cut.tokens == 0 ? walk.sequence.index : number,
                   [](float& element, const float& at) { element = at; });
}

template <typename T, int Slabs, int Slots, bool Reverse>
__device__ inline void ScanBlock<T, Slabs, Slots, Reverse>::find_states() {
  const int rows_before = p.memory[0].width, width = rows_before + p.memory[1].width;
  pack_row = kRows * warp + lane() / kPacks, pack_col = lane() % kPacks * 8;
  chunk_stride = static_cast<int64_t>(p.heads) * width * p.M;
  first_chunk = first_piece(p.tokens, walk.sequence, kChunk) + (walk.start - walk.sequence.start) / kChunk;
#pragma unroll
  for (int i = 0; i < Slabs; ++i) {
    const int row = slab[i].memory * rows_before + slab[i].col + pack_row;
    states[i] = static_cast<T*>(p.states) + first_chunk * chunk_stride +
                (static_cast<int64_t>(head) * width + row) * p.M + col + pack_col;
  }
}

// Forward: s~ = s * e^{L_C - L} (in reverse s is weighted already). Writes e^{L_C} over the gates of the
// first token, which only this warp has read.
template <typename T, int Slabs, int Slots, bool Reverse>
__device__ inline void ScanBlock<T, Slabs, Slots, Reverse>::weigh_chunk(const Stage& stage, bool has_s,
                                                                        bool first) const {
  const int own_col = 8 * kOwn * warp;
#pragma unroll
  for (int n = 0; n < kOwn; ++n) {
    const int eight = own_col + 8 * n, m = eight + lane_col();
    uint32_t s_of[kBlocks][2];
    if constexpr (!Reverse) load_s<T>(s_of, stage, eight, has_s);
    Sums<kBlocks> weight;
    Sums<1> total;
    weigh<Reverse>(weight, total, stage.g(), eight);
#pragma unroll
    for (int block = 0; block < (Reverse ? 0 : kBlocks); ++block) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 value = unpaired<T>(s_of[block][i]);
        const float(&by)[4] = weight.at[block];
        *reinterpret_cast<uint32_t*>(&lane_at(stage.s(), block_row<Reverse>(block) + 8 * i, eight)) =
            pair_of<T>(value.x * by[2 * i], value.y * by[2 * i + 1]);
      }
    }
    __syncwarp();
    if (lane_row() == 0) {
      const float(&sum)[4] = total.at[0];
      *reinterpret_cast<float2*>(&stage.g().at(0, m)) = {exp2_fast(sum[0] * kLog2E),
                                                         exp2_fast(sum[1] * kLog2E)};
      if (alone && first) {
        carried.gates[warpgroup][m] += sum[0];
        carried.gates[warpgroup][m + 1] += sum[1];
      }
    }
  }
}

// U += x^T s~
template <typename T, int Slabs, int Slots, bool Reverse>
__device__ inline void ScanBlock<T, Slabs, Slots, Reverse>::add_chunk(const Stage& stage) {
#pragma unroll
  for (int k = 0; k < kChunk; k += 16) {
    uint32_t a[Slabs][4];
#pragma unroll
    for (int i = 0; i < Slabs; ++i) load_block_transposed(a[i], stage.x(i), kRows * warp, k);
    add_products<T>(u, a, stage.s(), k);
  }
}

// S <- S e^{L_C} + U, or (S + U) e^{L_C}, after the previous warpgroup has finished; before: the old S,
// rounded.
template <typename T, int Slabs, int Slots, bool Reverse>
__device__ inline void ScanBlock<T, Slabs, Slots, Reverse>::carry(const Stage& stage, int turn, bool after_it,
                                                                  unsigned& parity, Rounded& before) {
  float2 decay[kN];
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    decay[n] = *reinterpret_cast<const float2*>(&stage.g().at(0, 8 * n + lane_col()));
  }
  if constexpr (Reverse) {
#pragma unroll
    for (int i = 0; i < Slabs; ++i) {
      if (!after_it) continue;
      scale_columns(u[i], [&](int n) { return decay[n]; });
      shift<T>(u[i]);
    }
  }
  if (turn > 0) {
    wait(&carried.turns[warpgroup][warp], parity);
    parity ^= 1;
  }
#pragma unroll
  for (int i = 0; i < Slabs; ++i) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      float4& here = state()[(i * kN + n) * kWarpgroup];
      const float4 old = here;
      const float(&add)[4] = u[i].at[n];
      here = make_float4(fmaf(old.x, decay[n].x, add[0]), fmaf(old.y, decay[n].y, add[1]),
                         fmaf(old.z, decay[n].x, add[2]), fmaf(old.w, decay[n].y, add[3]));
      before[i][n][0] = pair_of<T>(old.x, old.y);
      before[i][n][1] = pair_of<T>(old.z, old.w);
    }
    fill(u[i], 0.f);
  }
  if (turn + 1 < walk.chunks) arrive(&carried.turns[(warpgroup + 1) % pass.warpgroups][warp]);
}

// Stores the state before the chunk to global memory.
template <typename T, int Slabs, int Slots, bool Reverse>
__device__ inline void ScanBlock<T, Slabs, Slots, Reverse>::publish(const Stage& stage, int turn,
                                                                    const Rounded& before) const {
  // Through the tile x, so that neighbouring lanes write whole lines.
  const int64_t chunk = walk.chunk_of(turn) * chunk_stride;
#pragma unroll
  for (int i = 0; i < Slabs; ++i) {
    const auto tile = stage.states(i);
    each_pair<kN>([&](int n, int j) {
      *reinterpret_cast<uint32_t*>(&lane_at(tile, kRows * warp + 8 * j, 8 * n)) = before[i][n][j];
    });
    __syncwarp();
    T* row = states[i] + chunk;
#pragma unroll
    for (int j = 0; j < kRows; j += 32 / kPacks) {
      if (pack_row + j < slab[i].cols && pack_col < cols) {
        *reinterpret_cast<uint4*>(row) = *reinterpret_cast<const uint4*>(&tile.at(pack_row + j, pack_col));
      }
      row += 32 / kPacks * p.M;
    }
  }
}

template <typename T, int Slabs, int Slots, bool Reverse>
__device__ inline void ScanBlock<T, Slabs, Slots, Reverse>::end() const {
  if (alone) {
    __syncthreads();
    if (group == 0 && static_cast<int>(threadIdx.x) < cols) {
      float sum = 0.f;
      for (int i = 0; i < pass.warpgroups; ++i) sum += carried.gates[i][threadIdx.x];
      pass.cut.decay[(number * p.heads + head) * p.M + col + threadIdx.x] = sum;
    }
  }
  // The warpgroup of the last chunk has the final state.
  if (warpgroup != (walk.chunks == 0 ? 0 : (walk.chunks - 1) % pass.warpgroups)) return;
  if (!alone && !walk.nothing_follows) return;
  for_each_element([&](int memory) -> const Out<4>& { return p.memory[memory].final; },
                   alone ? number : walk.sequence.index, [](float element, float& at) { at = element; });
}

}  // namespace girih::kernels::gsa
