// The scan's kernel. A chunk of C = 64 tokens, L its gates' running sums:
//
//     forward   S <- S Diag(e^{L_C}) + x^T (s * e^{L_C - L})      states[c] = S before chunk c
//     reverse   S <- S Diag(e^{L_C}) + x^T s, s = y * e^{L}       states[c] = S before it gets chunk c, the
//               or (S + x^T s) Diag(e^{L_C}), s = y * e^{L - L_C} last chunk first
//
// No exponent is above zero but in y * e^{L - L_C}, which factored_limit() bounds, so nothing overflows; what
// underflows is gone from the state anyway.
//
// A block has Slabs x 64 rows and Slots columns of one head's state, for all chunks of a sequence or a
// segment of one. U = x^T s~ (s~ the weighted s) does not need S, so the block's warpgroups take chunks in
// turn, and S <- S e^{L_C} + U alone goes from one to the next. S lies in shared memory in fp32; thread i of
// every warpgroup has the same elements of it, and a barrier for every warp hands them over. Every warpgroup
// has its own ring of stages, filled by cp.async. In a warpgroup every warp has the gates and s~ of a quarter
// of the columns, all 64 tokens of them, so that their sums stay within a warp, and then 16 rows a slab of U.
#pragma once

#include <type_traits>

#include "gsa/gsa.h"
#include "tile/gates.h"
#include "tile/grid.h"
#include "tile/matrix.h"
#include "tile/shared.h"

namespace girih::kernels::gsa {

constexpr int kWarpgroup = 128;  // threads
constexpr int kMaxWarpgroups = 3;

// One launch over a scan: of whole sequences, or of segments.
struct ScanPass {
  GatedScan scan;
  // Tokens, a multiple of 64; 0: whole sequences. The initial states are then the segments', not the
  // sequences'.
  int64_t segment;
  // Not null: every segment from zero, for what it adds to the state. The final states are the segments', the
  // sums of their gates go here, [segments, heads, M]; nothing is published, and segments that nothing
  // follows are left out.
  float* segment_decay;
  bool shared_s;  // the memories have the same s, so a block may have rows of both
  int warpgroups, stages;
};

__host__ __device__ inline int slabs_of(int width) { return (width + kSlab - 1) / kSlab; }

// Groups of `slabs` slabs, each a block's, that cover the rows of the state.
__host__ __device__ inline int slab_groups(const ScanPass& pass, int slabs) {
  const int first = slabs_of(pass.scan.memory[0].width), second = slabs_of(pass.scan.memory[1].width);
  return pass.shared_s ? (first + second + slabs - 1) / slabs
                       : (first + slabs - 1) / slabs + (second + slabs - 1) / slabs;
}

struct Slab {
  int memory;
  int col;   // first column of that memory's x
  int cols;  // none: past the end
};

// The i-th slab of a group.
__device__ inline Slab slab_at(const ScanPass& pass, int slabs, int group, int i) {
  const int first = slabs_of(pass.scan.memory[0].width);
  int slab = group * slabs + i, memory = 0;
  if (pass.shared_s) {
    memory = slab >= first;
    slab -= memory * first;
  } else if (const int groups = (first + slabs - 1) / slabs; group >= groups) {
    memory = 1;
    slab -= groups * slabs;
  }
  const int cols = pass.scan.memory[memory].width - slab * kSlab;
  return {memory, slab * kSlab, cols < 0 ? 0 : cols > kSlab ? kSlab : cols};
}

// What a chunk brings.
template <typename T, int Slabs, int Slots>
struct Stage {
  using X = SharedTile<T, kChunk, kSlab>;
  using S = SharedTile<T, kChunk, Slots>;
  using G = SharedTile<float, kChunk, Slots>;
  static constexpr int kBytes = Slabs * X::kBytes + S::kBytes + G::kBytes;

  char* data;

  __device__ X x(int slab) const { return {reinterpret_cast<T*>(data + slab * X::kBytes)}; }
  // In the place of x, the rows of the state that are written out.
  __device__ S states(int slab) const { return {reinterpret_cast<T*>(data + slab * X::kBytes)}; }
  __device__ S s() const { return {reinterpret_cast<T*>(data + Slabs * X::kBytes)}; }
  __device__ G g() const { return {reinterpret_cast<float*>(data + Slabs * X::kBytes + S::kBytes)}; }
};

constexpr int kWarps = kWarpgroup / 32;

// What lies before the stages: the state, every warpgroup's sums of gates, and a barrier for every warp.
template <int Slabs, int Slots>
struct Carried {
  float state[Slabs * kSlab * Slots];
  float gates[kMaxWarpgroups][Slots];
  alignas(128) uint64_t turns[kMaxWarpgroups][kWarps];
};
template <int Slabs, int Slots>
constexpr int kCarriedBytes = (sizeof(Carried<Slabs, Slots>) + 127) / 128 * 128;

// The first element of a head's columns from `col` on.
template <typename T>
__device__ inline const T* at(const In<4>& in, int64_t batch, int64_t token, int64_t head, int64_t col) {
  return static_cast<const T*>(in.data) + batch * in.stride[0] + token * in.stride[1] + head * in.stride[2] +
         col * in.stride[3];
}

constexpr int kBlocks = kChunk / kRows;
// A chunk's 16-token blocks in the order in which gates add up: from the token where the state is wanted.
template <bool Reverse>
__device__ constexpr int block_row(int block) {
  return kRows * (Reverse ? block : kBlocks - 1 - block);
}

// Eight columns of a chunk. total = L_C; forward, weight = e^{sum of the gates after a token}, block after
// block.
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

// The same columns of s forward, in rounded pairs; from the gates where there is no s.
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
__global__ void __launch_bounds__(kMaxWarpgroups* kWarpgroup, 1) scan(const __grid_constant__ ScanPass pass) {
  using Stage = Stage<T, Slabs, Slots>;
  constexpr int kN = Slots / 8;
  extern __shared__ __align__(128) char shared[];
  const GatedScan& p = pass.scan;
  const int thread = threadIdx.x % kWarpgroup, warpgroup = threadIdx.x / kWarpgroup, warp = thread / 32;

  // Which part of which state.
  const unsigned tiles = (p.M + Slots - 1) / Slots, groups = slab_groups(pass, Slabs);
  unsigned job = blockIdx.x;
  const int col = static_cast<int>(job % tiles) * Slots;
  job /= tiles;
  const int group = static_cast<int>(job % groups);
  job /= groups;
  const int head = static_cast<int>(job % p.heads);
  const int64_t number = job / p.heads;
  const int cols = min(Slots, p.M - col);
  Slab slab[Slabs];
#pragma unroll
  for (int i = 0; i < Slabs; ++i) slab[i] = slab_at(pass, Slabs, group, i);

  // Which tokens.
  Sequence sequence;
  int64_t start, end;
  if (pass.segment == 0) {
    sequence = sequence_at(p.tokens, number);
    start = sequence.start;
    end = sequence.end;
  } else {
    const Piece piece = piece_at(p.tokens, number, pass.segment);
    if (piece.length == 0 && piece.index != 0) return;
    sequence = piece.sequence;
    start = piece.start;
    end = start + piece.length;
  }
  const bool nothing_follows = Reverse ? start == sequence.start : end == sequence.end;
  const bool alone = pass.segment_decay != nullptr;
  if (alone && nothing_follows) return;
  const int length = static_cast<int>(end - start), chunks = (length + kChunk - 1) / kChunk;
  const auto chunk_of = [&](int turn) { return Reverse ? chunks - 1 - turn : turn; };

  // The warpgroup's ring of stages, and what fills them: for every group-th of its chunks the members of the
  // group.
  char* const ring = shared + kCarriedBytes<Slabs, Slots> + warpgroup * pass.stages * Stage::kBytes;
  // Chosen by value: an index into the parameters is a load, and would stand before the first copy.
  const In<4> s_in = slab[0].memory == 0 ? p.memory[0].s : p.memory[1].s;
  const bool has_s = s_in.data != nullptr;
  const int64_t first_head = static_cast<int64_t>(head) * p.group;
  const TileCopier<kWarpgroup, typename Stage::G> g(at<float>(p.g, sequence.batch, start, head, col),
                                                    p.g.stride[1], cols, thread);
  const TileCopier<kWarpgroup, typename Stage::S> s(at<T>(s_in, sequence.batch, start, first_head, col),
                                                    s_in.stride[1], cols, thread);
  const auto x_of = [&](const Slab& of) {
    const In<4> in = of.memory == 0 ? p.memory[0].x : p.memory[1].x;
    return TileCopier<kWarpgroup, typename Stage::X>(at<T>(in, sequence.batch, start, first_head, of.col),
                                                     in.stride[1], of.cols, thread);
  };
  const TileCopier<kWarpgroup, typename Stage::X> x[2] = {x_of(slab[0]), x_of(slab[Slabs - 1])};
  int next = warpgroup, next_member = 0;
  const auto load_next = [&](const Stage& stage) {
    if (next < chunks) {
      const int token = chunk_of(next) * kChunk, rows = min(kChunk, length - token);
      int64_t member_of_s = 0, member_of_x[Slabs] = {};
      if (next_member > 0) {
        member_of_s = next_member * p.memory[slab[0].memory].s.stride[2];
#pragma unroll
        for (int i = 0; i < Slabs; ++i) member_of_x[i] = next_member * p.memory[slab[i].memory].x.stride[2];
      }
      g.start(stage.g(), token, rows);
      if (has_s) s.start(stage.s(), token, rows, member_of_s);
#pragma unroll
      for (int i = 0; i < Slabs; ++i) x[i].start(stage.x(i), token, rows, member_of_x[i]);
      if (++next_member == p.group) {
        next_member = 0;
        next += pass.warpgroups;
      }
    }
    commit_copies();
  };
  for (int i = 0; i < pass.stages; ++i) load_next(Stage{ring + i * Stage::kBytes});

  // A float4 of the state is a thread's: two rows of one slab, columns 8n + lane_col() and the next.
  auto& carried = *reinterpret_cast<Carried<Slabs, Slots>*>(shared);
  float4* const state = reinterpret_cast<float4*>(carried.state) + thread;
  uint64_t* const my_turn = &carried.turns[warpgroup][warp];
  uint64_t* const next_turn = &carried.turns[(warpgroup + 1) % pass.warpgroups][warp];
  if (lane() == 0) init_barrier(my_turn, 32);
  if (thread < Slots) carried.gates[warpgroup][thread] = 0.f;
  const int rows_before = p.memory[0].width, width = rows_before + p.memory[1].width;

  // f(element, its place) for those of the thread's elements that exist in an array of states, array(memory)
  // one of each. Places move on from one to the next.
  const auto for_each_element = [&](const auto& array, int64_t index, const auto& f) {
    using Place = std::conditional_t<std::is_same_v<decltype(array(0)), const In<4>&>, const float, float>;
#pragma unroll 1
    for (int i = 0; i < Slabs; ++i) {
      const Slab here = i == 0 ? slab[0] : slab[Slabs - 1];
      const auto& of = array(here.memory);
      if (of.data == nullptr) continue;
      const int row = kRows * warp + lane_row(), slots = cols - lane_col();
      const bool has[2] = {row < here.cols, row + 8 < here.cols};
      const int64_t by_row = 8 * of.stride[2], by_slot = of.stride[3];
      Place* first = static_cast<Place*>(of.data) + index * of.stride[0] + head * of.stride[1] +
                     (here.col + row) * of.stride[2] + (col + lane_col()) * by_slot;
      Place* next = first + by_slot;
      float4* element = state + i * kN * kWarpgroup;
#pragma unroll 4
      for (int n = 0; n < kN; ++n) {
        if (has[0] && 8 * n < slots) f(element->x, first[0]);
        if (has[0] && 8 * n + 1 < slots) f(element->y, next[0]);
        if (has[1] && 8 * n < slots) f(element->z, first[by_row]);
        if (has[1] && 8 * n + 1 < slots) f(element->w, next[by_row]);
        first += 8 * by_slot, next += 8 * by_slot, element += kWarpgroup;
      }
    }
  };

  // Warpgroup 0 has the first chunk, so what it stores here only it reads.
  if (warpgroup == 0) {
#pragma unroll
    for (int i = 0; i < Slabs * kN; ++i) state[i * kWarpgroup] = make_float4(0.f, 0.f, 0.f, 0.f);
    for_each_element([&](int memory) -> const In<4>& { return p.memory[memory].initial; },
                     pass.segment == 0 ? sequence.index : number,
                     [](float& element, const float& at) { element = at; });
  }

  // Where the thread's packs of a published state go.
  constexpr int kPacks = Slots / 8;  // a row's, of 16 bytes
  const int pack_row = kRows * warp + lane() / kPacks, pack_col = lane() % kPacks * 8;
  const int64_t chunk_stride = static_cast<int64_t>(p.heads) * width * p.M;
  const int64_t first_chunk = first_piece(p.tokens, sequence, kChunk) + (start - sequence.start) / kChunk;
  T* states[Slabs];
#pragma unroll
  for (int i = 0; i < Slabs; ++i) {
    const int row = slab[i].memory * rows_before + slab[i].col + pack_row;
    states[i] = static_cast<T*>(p.states) + first_chunk * chunk_stride +
                (static_cast<int64_t>(head) * width + row) * p.M + col + pack_col;
  }

  const int mine = 1 + warpgroup;    // the warpgroup's own barrier
  constexpr int kOwn = kN / kWarps;  // of the columns, in eights, those whose gates are the warp's
  const int own_col = 8 * kOwn * warp;
  Sums<kN> u[Slabs];
#pragma unroll
  for (int i = 0; i < Slabs; ++i) fill(u[i], 0.f);
  __syncthreads();

  int slot = 0, member = 0;
  unsigned parity = 0;
  for (int turn = warpgroup; turn < chunks;) {
    const Stage stage{ring + slot * Stage::kBytes};
    bool after_it = false;  // U takes part in the chunk's decay
    if constexpr (Reverse) after_it = p.factored[(first_chunk + chunk_of(turn)) * p.heads + head];
    if (pass.stages == 2) {
      wait_copies<1>();
    } else {
      wait_copies<0>();
    }
    barrier_wait(mine, kWarpgroup);

    // Forward s~ = s * weight (in reverse s has its weights), and e^{L_C} in the place of the first token's
    // gates, which only this warp has read.
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
        if (alone && member == 0) {
          carried.gates[warpgroup][m] += sum[0];
          carried.gates[warpgroup][m + 1] += sum[1];
        }
      }
    }
    barrier_wait(mine, kWarpgroup);

    // U += x^T s~
#pragma unroll
    for (int k = 0; k < kChunk; k += 16) {
      uint32_t a[Slabs][4];
#pragma unroll
      for (int i = 0; i < Slabs; ++i) load_block_transposed(a[i], stage.x(i), kRows * warp, k);
      add_products<T>(u, a, stage.s(), k);
    }

    if (++member == p.group) {
      float2 decay[kN];
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        decay[n] = *reinterpret_cast<const float2*>(&stage.g().at(0, 8 * n + lane_col()));
      }
      if constexpr (Reverse) {
#pragma unroll
        for (int i = 0; i < Slabs; ++i) {
          if (after_it) scale_columns(u[i], [&](int n) { return decay[n]; });
        }
      }
      if (turn > 0) {
        wait(my_turn, parity);
        parity ^= 1;
      }
      // S <- S e^{L_C} + U
      uint32_t before[Slabs][kN][2];
#pragma unroll
      for (int i = 0; i < Slabs; ++i) {
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          float4& here = state[(i * kN + n) * kWarpgroup];
          const float4 old = here;
          const float(&add)[4] = u[i].at[n];
          here = make_float4(fmaf(old.x, decay[n].x, add[0]), fmaf(old.y, decay[n].y, add[1]),
                             fmaf(old.z, decay[n].x, add[2]), fmaf(old.w, decay[n].y, add[3]));
          before[i][n][0] = pair_of<T>(old.x, old.y);
          before[i][n][1] = pair_of<T>(old.z, old.w);
        }
        fill(u[i], 0.f);
      }
      if (turn + 1 < chunks) arrive(next_turn);

      if (!alone) {
        barrier_wait(mine, kWarpgroup);  // all four warps are done with x
        // Through the tile of x, so that neighbouring lanes write whole lines.
        const int64_t chunk = chunk_of(turn) * chunk_stride;
#pragma unroll
        for (int i = 0; i < Slabs; ++i) {
          const auto tile = stage.states(i);
#pragma unroll
          for (int n = 0; n < kN; ++n) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              *reinterpret_cast<uint32_t*>(&lane_at(tile, kRows * warp + 8 * j, 8 * n)) = before[i][n][j];
            }
          }
          __syncwarp();
          T* row = states[i] + chunk;
#pragma unroll
          for (int j = 0; j < kRows; j += 32 / kPacks) {
            if (pack_row + j < slab[i].cols && pack_col < cols) {
              *reinterpret_cast<uint4*>(row) =
                  *reinterpret_cast<const uint4*>(&tile.at(pack_row + j, pack_col));
            }
            row += 32 / kPacks * p.M;
          }
        }
      }
      member = 0;
      turn += pass.warpgroups;
    }
    barrier_wait(mine, kWarpgroup);
    load_next(stage);
    slot = slot + 1 == pass.stages ? 0 : slot + 1;
  }
  wait_copies<0>();

  if (alone) {
    __syncthreads();
    if (group == 0 && static_cast<int>(threadIdx.x) < cols) {
      float sum = 0.f;
      for (int i = 0; i < pass.warpgroups; ++i) sum += carried.gates[i][threadIdx.x];
      pass.segment_decay[(number * p.heads + head) * p.M + col + threadIdx.x] = sum;
    }
  }

  // The warpgroup that had the last chunk has the last state.
  if (warpgroup != (chunks == 0 ? 0 : (chunks - 1) % pass.warpgroups)) return;
  if (!alone && !nothing_follows) return;
  for_each_element([&](int memory) -> const Out<4>& { return p.memory[memory].final; },
                   alone ? number : sequence.index, [](float element, float& at) { at = element; });
}

}  // namespace girih::kernels::gsa
