// A block of the scan: its part of the state, and the phases of a chunk.
#pragma once

#include "gsa/chunk_gates.cuh"
#include "gsa/scan_stage.cuh"
#include "tile/strided_elements.h"

namespace girih::kernels::gsa {

// First row of the b-th sub-chunk in the order of summation. Forward sums gates from the last sub-chunk to
// the first, because s~ needs the gates after a token. Reverse needs only L_C.
template <bool Reverse>
__device__ constexpr int subchunk_row(int b) {
  return kSubchunk * (Reverse ? b : kSubchunks - 1 - b);
}

// For 8 columns of a chunk: total = L_C, and in forward decay_to_end = e^{L_C - L}. decay_to_end.at[b] has
// the rows from subchunk_row(b).
template <bool Reverse, class Tile>
__device__ inline void compute_decays(Accumulator<kSubchunks>& decay_to_end, Accumulator<1>& total,
                                      const Tile& g, int col) {
  uint32_t suffix_ones[4], total_ones[4];
  fill_ones(suffix_ones, RowRange::later);
  fill_ones(total_ones, RowRange::all);
  fill(total, 0.f);
#pragma unroll
  for (int b = 0; b < kSubchunks; ++b) {
    GateParts<1> gates;
    load(gates, g, subchunk_row<Reverse>(b), col);
    Accumulator<1> sums = total;
    add_gates(total, total_ones, gates);
    if constexpr (Reverse) continue;
    add_gates(sums, suffix_ones, gates);
#pragma unroll
    for (int i = 0; i < 4; ++i) decay_to_end.at[b][i] = exp2_fast(sums.at[0][i] * kLog2E);
  }
}

// Loads 8 columns of s from column `col`, in forward: s[b][i] is the pair at row subchunk_row(b) + lane_row()
// + 8 i, columns col + lane_col() and the next. If s is absent, s = 1 - e^g.
template <typename T, class Stage>
__device__ inline void load_s(uint32_t (&s)[kSubchunks][2], const Stage& stage, int col, bool has_s) {
  const auto set_pairs = [&](auto pair_at) {
#pragma unroll
    for (int i = 0; i < 2 * kSubchunks; ++i) {
      s[i / 2][i % 2] = pair_at(subchunk_row<false>(i / 2) + i % 2 * 8);
    }
  };
  if (has_s) {
    set_pairs(
        [&](int row) { return *reinterpret_cast<const uint32_t*>(&lane_element(stage.s(), row, col)); });
  } else {
    set_pairs([&](int row) {
      const float2 gates = *reinterpret_cast<const float2*>(&lane_element(stage.g(), row, col));
      return pack_pair<T>(one_minus_exp(gates.x), one_minus_exp(gates.y));
    });
  }
}

template <typename T, int Slabs, int Slots, bool Reverse>
struct ScanBlock {
  using Stage = gsa::Stage<T, Slabs, Slots>;
  static constexpr int kN = Slots / 8;
  static constexpr int kPacks = Slots / 8;                 // 16-byte packs of a row of a stored state
  static constexpr int kWarpTiles = kN / kWarpgroupWarps;  // tiles of 8 columns whose gates the warp sums
  using PackedState = uint32_t[Slabs][kN][2];  // the thread's elements of the state, rounded, in pairs

  const ScanParams& params;
  const GatedScan& p;
  SharedState<Slabs, Slots>& shared_state;
  const int thread, warpgroup, warp;  // thread and warp in the warpgroup
  const bool is_local_scan;
  // The block's part of the state: the slabs of a row tile, and columns first_col to first_col + cols - 1.
  int row_tile, head, first_col, cols;
  int64_t segment_index;  // among all segments, or sequences if these are not cut
  Slab slab[Slabs];
  ChunkRange<Reverse> range;
  // Row and column of the thread's first pack in a slab of a stored state. state_packs[i] is the address of
  // this pack for slab i and the first chunk of the range, whose number is first_chunk.
  int pack_row, pack_col;
  int64_t chunk_stride, first_chunk;
  T* state_packs[Slabs];
  Accumulator<kN> u[Slabs];

  __device__ ScanBlock(const ScanParams& params, char* shared)
      : params(params),
        p(params.problem),
        shared_state(*reinterpret_cast<SharedState<Slabs, Slots>*>(shared)),
        thread(threadIdx.x % kWarpgroupThreads),
        warpgroup(threadIdx.x / kWarpgroupThreads),
        warp(thread / 32),
        is_local_scan(params.segmentation.gate_sums != nullptr) {}

  // Maps the block index to the block's work. Returns false if there is none.
  __device__ bool init();
  __device__ void init_state_packs();
  template <class TensorOf, class F>
  __device__ void for_each_element(const TensorOf& tensor_of, int64_t state_index, const F& f) const;
  __device__ void load_initial_state() const;
  __device__ void apply_chunk_gates(const Stage& stage, bool has_s, bool is_first_query) const;
  __device__ void accumulate_update(const Stage& stage);
  __device__ void update_state(const Stage& stage, int step, bool is_factored, unsigned& phase,
                               PackedState& old_state);
  __device__ void store_state(const Stage& stage, int step, const PackedState& old_state) const;
  __device__ void store_final_state() const;

  // The thread's elements of the state, which is float4 [Slabs][kN][128] in the order of C fragments: element
  // (i, n) has rows lane_row() and lane_row() + 8 of the warp's 16 rows in slab i, columns 8n + lane_col()
  // and the next.
  __device__ float4* state() const { return reinterpret_cast<float4*>(shared_state.state) + thread; }
  // Barrier of the warpgroup.
  __device__ void sync_warpgroup() const { named_barrier_sync(1 + warpgroup, kWarpgroupThreads); }
};

template <typename T, int Slabs, int Slots, bool Reverse>
__device__ inline bool ScanBlock<T, Slabs, Slots, Reverse>::init() {
  const unsigned slot_tiles = (p.M + Slots - 1) / Slots, row_tiles = count_row_tiles(params, Slabs);
  unsigned block_index = blockIdx.x;
  first_col = static_cast<int>(block_index % slot_tiles) * Slots;
  block_index /= slot_tiles;
  row_tile = static_cast<int>(block_index % row_tiles);
  block_index /= row_tiles;
  head = static_cast<int>(block_index % p.heads);
  segment_index = block_index / p.heads;
  cols = min(Slots, p.M - first_col);
#pragma unroll
  for (int i = 0; i < Slabs; ++i) slab[i] = slab_at(params, Slabs, row_tile, i);
  return range.init(p.tokens, params.segmentation.segment_tokens, segment_index, is_local_scan);
}

// Calls f(element, the element in global memory) for the thread's elements inside of a tensor of states;
// tensor_of(memory) returns the tensor of memory 0 or 1.
template <typename T, int Slabs, int Slots, bool Reverse>
template <class TensorOf, class F>
__device__ inline void ScanBlock<T, Slabs, Slots, Reverse>::for_each_element(const TensorOf& tensor_of,
                                                                             int64_t state_index,
                                                                             const F& f) const {
  using Element =
      std::conditional_t<std::is_same_v<decltype(tensor_of(0)), const InputTensor<4>&>, const float, float>;
#pragma unroll 1
  for (int i = 0; i < Slabs; ++i) {
    const Slab current = i == 0 ? slab[0] : slab[Slabs - 1];
    const auto& tensor = tensor_of(current.memory);
    if (tensor.data == nullptr) continue;
    float4* const elements = state() + i * kN * kWarpgroupThreads;
    for_each_strided_element<kN, 4>(
        [&](int n) -> float(&)[4] { return reinterpret_cast<float(&)[4]>(elements[n * kWarpgroupThreads]); },
        kWarpRows* warp + lane_row(), current.rows, lane_col(), cols,
        static_cast<Element*>(tensor.data) + state_index * tensor.stride[0] + head * tensor.stride[1] +
            current.first_row * tensor.stride[2] + first_col * tensor.stride[3],
        tensor.stride[2], tensor.stride[3], f);
  }
}

// Only warpgroup 0 loads the initial state. The other warpgroups read the state after warpgroup 0 has updated
// it with the first chunk (state_full).
template <typename T, int Slabs, int Slots, bool Reverse>
__device__ inline void ScanBlock<T, Slabs, Slots, Reverse>::load_initial_state() const {
  if (warpgroup != 0) return;
#pragma unroll
  for (int i = 0; i < Slabs * kN; ++i) state()[i * kWarpgroupThreads] = make_float4(0.f, 0.f, 0.f, 0.f);
  for_each_element([&](int memory) -> const InputTensor<4>& { return p.memory[memory].initial; },
                   params.segmentation.segment_tokens == 0 ? range.sequence.index : segment_index,
                   [](float& element, const float& stored) { element = stored; });
}

template <typename T, int Slabs, int Slots, bool Reverse>
__device__ inline void ScanBlock<T, Slabs, Slots, Reverse>::init_state_packs() {
  const int width0 = p.memory[0].width, width = width0 + p.memory[1].width;
  pack_row = kWarpRows * warp + lane() / kPacks, pack_col = lane() % kPacks * 8;
  chunk_stride = static_cast<int64_t>(p.heads) * width * p.M;
  first_chunk =
      first_token_range(p.tokens, range.sequence, kChunk) + (range.start - range.sequence.start) / kChunk;
#pragma unroll
  for (int i = 0; i < Slabs; ++i) {
    const int row = slab[i].memory * width0 + slab[i].first_row + pack_row;
    state_packs[i] = static_cast<T*>(p.states) + first_chunk * chunk_stride +
                     (static_cast<int64_t>(head) * width + row) * p.M + first_col + pack_col;
  }
}

// Replaces the gates of the chunk's first token by e^{L_C}; only this warp reads the gates of its columns.
// Forward also replaces s by s~. In reverse gsa_dq has scaled s.
template <typename T, int Slabs, int Slots, bool Reverse>
__device__ inline void ScanBlock<T, Slabs, Slots, Reverse>::apply_chunk_gates(const Stage& stage, bool has_s,
                                                                              bool is_first_query) const {
  const int warp_col = 8 * kWarpTiles * warp;
#pragma unroll
  for (int n = 0; n < kWarpTiles; ++n) {
    const int tile_col = warp_col + 8 * n, m = tile_col + lane_col();
    uint32_t s_pairs[kSubchunks][2];
    if constexpr (!Reverse) load_s<T>(s_pairs, stage, tile_col, has_s);
    Accumulator<kSubchunks> decay_to_end;
    Accumulator<1> total;
    compute_decays<Reverse>(decay_to_end, total, stage.g(), tile_col);
#pragma unroll
    for (int b = 0; b < (Reverse ? 0 : kSubchunks); ++b) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 value = unpack_pair<T>(s_pairs[b][i]);
        const float(&factor)[4] = decay_to_end.at[b];
        *reinterpret_cast<uint32_t*>(&lane_element(stage.s(), subchunk_row<Reverse>(b) + 8 * i, tile_col)) =
            pack_pair<T>(value.x * factor[2 * i], value.y * factor[2 * i + 1]);
      }
    }
    __syncwarp();
    if (lane_row() == 0) {
      const float(&sum)[4] = total.at[0];
      *reinterpret_cast<float2*>(&stage.g().at(0, m)) = {exp2_fast(sum[0] * kLog2E),
                                                         exp2_fast(sum[1] * kLog2E)};
      if (is_local_scan && is_first_query) {
        shared_state.gate_sums[warpgroup][m] += sum[0];
        shared_state.gate_sums[warpgroup][m + 1] += sum[1];
      }
    }
  }
}

// U += x^T s~, in reverse x^T s
template <typename T, int Slabs, int Slots, bool Reverse>
__device__ inline void ScanBlock<T, Slabs, Slots, Reverse>::accumulate_update(const Stage& stage) {
#pragma unroll
  for (int k = 0; k < kChunk; k += 16) {
    uint32_t a[Slabs][4];
#pragma unroll
    for (int i = 0; i < Slabs; ++i) load_block_transposed(a[i], stage.x(i), kWarpRows * warp, k);
    add_products<T>(u, a, stage.s(), k);
  }
}

// Waits until the previous warpgroup has updated S. Then S <- S Diag(e^{L_C}) + U, or if factored (S + U)
// Diag(e^{L_C}). old_state becomes S before the update, rounded.
template <typename T, int Slabs, int Slots, bool Reverse>
__device__ inline void ScanBlock<T, Slabs, Slots, Reverse>::update_state(const Stage& stage, int step,
                                                                         bool is_factored, unsigned& phase,
                                                                         PackedState& old_state) {
  float2 decay[kN];  // e^{L_C}
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    decay[n] = *reinterpret_cast<const float2*>(&stage.g().at(0, 8 * n + lane_col()));
  }
  if constexpr (Reverse) {
#pragma unroll
    for (int i = 0; i < Slabs; ++i) {
      if (!is_factored) continue;
      scale_columns(u[i], [&](int n) { return decay[n]; });
      apply_shift<T>(u[i]);  // s contains 2^-factor_shift
    }
  }
  if (step > 0) {
    wait(&shared_state.state_full[warpgroup][warp], phase);
    phase ^= 1;
  }
#pragma unroll
  for (int i = 0; i < Slabs; ++i) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      float4& current = state()[(i * kN + n) * kWarpgroupThreads];
      const float4 old = current;
      const float(&update)[4] = u[i].at[n];
      current = make_float4(fmaf(old.x, decay[n].x, update[0]), fmaf(old.y, decay[n].y, update[1]),
                            fmaf(old.z, decay[n].x, update[2]), fmaf(old.w, decay[n].y, update[3]));
      old_state[i][n][0] = pack_pair<T>(old.x, old.y);
      old_state[i][n][1] = pack_pair<T>(old.z, old.w);
    }
    fill(u[i], 0.f);
  }
  if (step + 1 < range.chunks) arrive(&shared_state.state_full[(warpgroup + 1) % params.warpgroups][warp]);
}

// Stores the state before the chunk to global memory.
template <typename T, int Slabs, int Slots, bool Reverse>
__device__ inline void ScanBlock<T, Slabs, Slots, Reverse>::store_state(const Stage& stage, int step,
                                                                        const PackedState& old_state) const {
  // The state passes through the tile x, so that neighbouring lanes write whole sectors of 32 bytes.
  const int64_t chunk_offset = range.chunk_index(step) * chunk_stride;
#pragma unroll
  for (int i = 0; i < Slabs; ++i) {
    const auto tile = stage.state_tile(i);
    for_each_register_pair<kN>([&](int n, int j) {
      *reinterpret_cast<uint32_t*>(&lane_element(tile, kWarpRows * warp + 8 * j, 8 * n)) = old_state[i][n][j];
    });
    __syncwarp();
    T* row = state_packs[i] + chunk_offset;
#pragma unroll
    for (int j = 0; j < kWarpRows; j += 32 / kPacks) {
      if (pack_row + j < slab[i].rows && pack_col < cols) {
        *reinterpret_cast<uint4*>(row) = *reinterpret_cast<const uint4*>(&tile.at(pack_row + j, pack_col));
      }
      row += 32 / kPacks * p.M;
    }
  }
}

template <typename T, int Slabs, int Slots, bool Reverse>
__device__ inline void ScanBlock<T, Slabs, Slots, Reverse>::store_final_state() const {
  if (is_local_scan) {
    __syncthreads();
    if (row_tile == 0 && static_cast<int>(threadIdx.x) < cols) {
      float sum = 0.f;
      for (int i = 0; i < params.warpgroups; ++i) sum += shared_state.gate_sums[i][threadIdx.x];
      params.segmentation.gate_sums[(segment_index * p.heads + head) * p.M + first_col + threadIdx.x] = sum;
    }
  }
  // The warpgroup of the last chunk has the final state.
  if (warpgroup != (range.chunks == 0 ? 0 : (range.chunks - 1) % params.warpgroups)) return;
  if (!is_local_scan && !range.is_last_segment) return;
  for_each_element([&](int memory) -> const OutputTensor<4>& { return p.memory[memory].final; },
                   is_local_scan ? segment_index : range.sequence.index,
                   [](float element, float& stored) { stored = element; });
}

}  // namespace girih::kernels::gsa
