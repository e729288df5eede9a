// The scan's kernel. A chunk of C = 64 tokens, L its gates' running sums:
//
//     forward   S <- S Diag(e^{L_C}) + x^T (s * e^{L_C - L})      states[c] = S before chunk c
//     reverse   S <- S Diag(e^{L_C}) + x^T (s * e^{L})            states[c] = S before it gets chunk c, the
//                                                                 last chunk first
//
// No exponent is above zero, so nothing overflows; what underflows is gone from the state anyway.
//
// A block has Slabs x 64 rows and Slots columns of one head's state, for all chunks of a sequence or a
// segment of one. U = x^T s~ does not need S, so the block's warpgroups take chunks in turn and only S <- S
// e^{L_C} + U goes from one to the next: S lies in shared memory in fp32, thread i of every warpgroup has the
// same elements of it, and named barriers hand it over. Every warpgroup has its own ring of stages, filled by
// cp.async. In a warpgroup, warp w has the gates and s~ of tokens 16w.. and then rows 16w.. of U.
#pragma once

#include "gsa/gsa.h"
#include "tile/gates.h"
#include "tile/grid.h"
#include "tile/matrix.h"
#include "tile/shared.h"

namespace girih::kernels::gsa {

constexpr int kSlab = 64;        // rows of the state, columns of x
constexpr int kWarpgroup = 128;  // threads
constexpr int kMaxWarpgroups = 3;

// One launch over a scan: of whole sequences, or of segments.
struct ScanPass {
  GatedScan scan;
  int64_t segment;  // tokens, a multiple of 64; 0: whole sequences
  // The segments' state ends and gate sums, [segments, heads, M]: this pass writes the end states and nothing
  // else. Absent: it publishes.
  float* segment_decay;
  // [segments, heads, rows, M] fp32: end states of that first pass, what segments start from in the second.
  float* segment_states;
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
  __device__ S s() const { return {reinterpret_cast<T*>(data + Slabs * X::kBytes)}; }
  __device__ G g() const { return {reinterpret_cast<float*>(data + Slabs * X::kBytes + S::kBytes)}; }
};

template <int Slabs, int Slots>
constexpr int kStateBytes = (Slabs * kSlab + 1) * Slots* static_cast<int>(sizeof(float));

// Where a column of a sequence's part of a [B, T, heads, width] tensor starts, and its strides.
template <typename T>
struct Rows {
  const T* data;
  int64_t token, head;
};
template <typename T>
__device__ inline Rows<T> rows_of(const In<4>& in, int64_t batch, int64_t token, int64_t head, int64_t col) {
  return {static_cast<const T*>(in.data) + batch * in.stride[0] + token * in.stride[1] + head * in.stride[2] +
              col * in.stride[3],
          in.stride[1], in.stride[2]};
}

template <int Stages>
__device__ inline void wait_stage(int stages) {
  if constexpr (Stages > 1) {
    if (stages < Stages) return wait_stage<Stages - 1>(stages);
  }
  wait_copies<Stages - 1>();
}

// weight = e^{gates between the token and the edge of the chunk where the state is wanted}, for the warp's 16
// tokens; total = L_C, for the thread's columns. Overwrites a row of g for every 16, after
// `before_overwrite`.
template <int N, class Tile, class F>
__device__ inline void weigh(Sums<N>& weight, float2 (&total)[N], const Tile& g, bool reverse, int warp,
                             int barrier, F before_overwrite) {
  const Sum sum = reverse ? Sum::through : Sum::after;
  uint32_t triangle[4];
  ones(triangle, sum);
  fill(weight, 0.f);
  add_gates(weight, triangle, g, kRows * warp);
  before_overwrite();

  // Sums of the warp's 16 rows: of the first row and all after it, or of all through the last.
  const bool holds = lane_row() == (reverse ? 7 : 0);
  float2 part[N];
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const float2 first = *reinterpret_cast<const float2*>(&g.at(kRows * warp, 8 * n + lane_col()));
    part[n] = reverse ? make_float2(weight.at[n][2], weight.at[n][3])
                      : make_float2(weight.at[n][0] + first.x, weight.at[n][1] + first.y);
  }
  __syncwarp();
#pragma unroll
  for (int n = 0; n < N; ++n) {
    if (holds) *reinterpret_cast<float2*>(&g.at(kRows * warp, 8 * n + lane_col())) = part[n];
  }
  barrier_wait(barrier, kWarpgroup);
#pragma unroll
  for (int n = 0; n < N; ++n) {
    float2 others = {0.f, 0.f};
    total[n] = {0.f, 0.f};
#pragma unroll
    for (int w = 0; w < kWarpgroup / 32; ++w) {
      const float2 of_warp = *reinterpret_cast<const float2*>(&g.at(kRows * w, 8 * n + lane_col()));
      total[n].x += of_warp.x;
      total[n].y += of_warp.y;
      const bool between = reverse ? w < warp : w > warp;
      others.x += between ? of_warp.x : 0.f;
      others.y += between ? of_warp.y : 0.f;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      weight.at[n][i] = exp2_fast((weight.at[n][i] + (i & 1 ? others.y : others.x)) * kLog2E);
    }
  }
}

template <typename T, int Slabs, int Slots>
__global__ void __launch_bounds__(kMaxWarpgroups* kWarpgroup, 1) scan(const __grid_constant__ ScanPass pass) {
  using Stage = Stage<T, Slabs, Slots>;
  constexpr int kN = Slots / 8;
  extern __shared__ __align__(16) char shared[];
  const GatedScan& p = pass.scan;
  const int thread = threadIdx.x % kWarpgroup, warpgroup = threadIdx.x / kWarpgroup, warp = thread / 32;

  // Which part of which state.
  const int tiles = (p.M + Slots - 1) / Slots, groups = slab_groups(pass, Slabs);
  int64_t job = blockIdx.x;
  const int col = static_cast<int>(job % tiles) * Slots;
  job /= tiles;
  const int group = static_cast<int>(job % groups);
  job /= groups;
  const int64_t head = job % p.heads;
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
  const bool nothing_follows = p.reverse ? start == sequence.start : end == sequence.end;
  const bool publishes = pass.segment_decay == nullptr;
  if (!publishes && nothing_follows) return;
  const int chunks = static_cast<int>(divide_up(end - start, kChunk));
  const int64_t first_chunk = first_piece(p.tokens, sequence, kChunk) + (start - sequence.start) / kChunk;

  // An element of the state: a float4 of a thread is its two rows of one slab, columns 8n + lane_col() and
  // the next. Behind them, the sum of all gates.
  float4* const state = reinterpret_cast<float4*>(shared) + thread;
  float* const gate_sum = reinterpret_cast<float*>(shared) + Slabs * kSlab * Slots;
  const auto at = [&](int i, int n) -> float4& { return state[(i * kN + n) * kWarpgroup]; };
  const int rows_in_memory0 = p.memory[0].width, width = rows_in_memory0 + p.memory[1].width;
  const int64_t segment_state = (number * p.heads + head) * width * p.M;

  // Calls f(element, offset of the memory's first row in the state, memory, row, column) for those of the
  // thread's elements that exist.
  const auto for_each_element = [&](auto f) {
#pragma unroll 1
    for (int j = 0; j < Slabs * kN * 4; ++j) {
      const int i = j / (kN * 4), n = j / 4 % kN, e = j % 4;
      const Slab here = i == 0 ? slab[0] : slab[Slabs - 1];
      const int row = kRows * warp + lane_row() + e / 2 * 8, m = 8 * n + lane_col() + e % 2;
      if (row < here.cols && m < cols)
        f(reinterpret_cast<float*>(&at(i, n))[e], here.memory, here.col + row, col + m);
    }
  };

  // Warpgroup 0 has the first chunk, so what it stores here only it reads.
  if (warpgroup == 0) {
#pragma unroll
    for (int i = 0; i < Slabs * kN; ++i) state[i * kWarpgroup] = make_float4(0.f, 0.f, 0.f, 0.f);
    for_each_element([&](float& element, int memory, int row, int m) {
      const In<4>& initial = p.memory[memory].initial;
      if (pass.segment != 0) {
        if (publishes)
          element = pass.segment_states[segment_state + (memory * rows_in_memory0 + row) * p.M + m];
      } else if (initial.data != nullptr) {
        element = static_cast<const float*>(
            initial.data)[sequence.index * initial.stride[0] + head * initial.stride[1] +
                          row * initial.stride[2] + m * initial.stride[3]];
      }
    });
    if (thread < Slots) gate_sum[thread] = 0.f;
  }

  const Rows<float> g = rows_of<float>(p.g, sequence.batch, start, head, col);
  const ScannedMemory& with_s = p.memory[slab[0].memory];
  const bool has_s = with_s.s.data != nullptr;
  const Rows<T> s = rows_of<T>(with_s.s, sequence.batch, start, head * p.group, col);
  Rows<T> x[Slabs];
#pragma unroll
  for (int i = 0; i < Slabs; ++i) {
    x[i] = rows_of<T>(p.memory[slab[i].memory].x, sequence.batch, start, head * p.group, slab[i].col);
  }

  // The warpgroup's j-th stage is member j % group of its (j / group)-th chunk.
  char* const ring = shared + kStateBytes<Slabs, Slots> + warpgroup * pass.stages * Stage::kBytes;
  const int steps = (chunks - warpgroup + pass.warpgroups - 1) / pass.warpgroups * p.group;
  const auto chunk_of = [&](int turn) { return p.reverse ? chunks - 1 - turn : turn; };
  const auto load = [&](int step, const Stage& stage) {
    if (step < steps) {
      const int64_t token =
          static_cast<int64_t>(chunk_of(warpgroup + step / p.group * pass.warpgroups)) * kChunk;
      const int member = step % p.group;
      const int rows = static_cast<int>(min(static_cast<int64_t>(kChunk), end - start - token));
      load_async<kWarpgroup>(stage.g(), g.data + token * g.token, g.token, rows, cols, thread);
      if (has_s) {
        load_async<kWarpgroup>(stage.s(), s.data + token * s.token + member * s.head, s.token, rows, cols,
                               thread);
      }
#pragma unroll
      for (int i = 0; i < Slabs; ++i) {
        load_async<kWarpgroup>(stage.x(i), x[i].data + token * x[i].token + member * x[i].head, x[i].token,
                               rows, slab[i].cols, thread);
      }
    }
    commit_copies();
  };
  for (int i = 0; i < pass.stages; ++i) load(i, Stage{ring + i * Stage::kBytes});

  const int mine = 1 + warpgroup;  // barriers: within the warpgroup, and for its turn at the state
  const int my_turn = 1 + pass.warpgroups + warpgroup;
  const int next_turn = 1 + pass.warpgroups + (warpgroup + 1) % pass.warpgroups;
  Sums<kN> u[Slabs];
#pragma unroll
  for (int i = 0; i < Slabs; ++i) fill(u[i], 0.f);

  int slot = 0;
  for (int step = 0; step < steps; ++step) {
    const Stage stage{ring + slot * Stage::kBytes};
    wait_stage<3>(pass.stages);
    barrier_wait(mine, kWarpgroup);

    // s~ = s * weight
    float2 total[kN];
    {
      Sums<kN> weight;
      uint32_t s_of[kN][2];  // rounded
      const auto fetch = [&] {
#pragma unroll
        for (int n = 0; n < kN; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int row = kRows * warp + lane_row() + 8 * i, m = 8 * n + lane_col();
            if (has_s) {
              s_of[n][i] = *reinterpret_cast<const uint32_t*>(&stage.s().at(row, m));
            } else {
              const float2 gates = *reinterpret_cast<const float2*>(&stage.g().at(row, m));
              s_of[n][i] = pair_of<T>(complement(gates.x), complement(gates.y));
            }
          }
        }
      };
      weigh(weight, total, stage.g(), p.reverse, warp, mine, fetch);
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int row = kRows * warp + lane_row() + 8 * i, m = 8 * n + lane_col();
          const float2 old = unpaired<T>(s_of[n][i]);
          *reinterpret_cast<uint32_t*>(&stage.s().at(row, m)) =
              pair_of<T>(old.x * weight.at[n][2 * i], old.y * weight.at[n][2 * i + 1]);
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

    const int turn = warpgroup + step / p.group * pass.warpgroups;
    if (step % p.group == p.group - 1) {
      float2 decay[kN];
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        decay[n] = {exp2_fast(total[n].x * kLog2E), exp2_fast(total[n].y * kLog2E)};
      }
      // Either barrier also tells that all four warps are done with x.
      if (turn > 0) {
        barrier_wait(my_turn, 2 * kWarpgroup);
      } else {
        barrier_wait(mine, kWarpgroup);
      }
      // S <- S e^{L_C} + U
      uint32_t before[Slabs][kN][2];
#pragma unroll
      for (int i = 0; i < Slabs; ++i) {
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          const float4 old = at(i, n);
          before[i][n][0] = pair_of<T>(old.x, old.y);
          before[i][n][1] = pair_of<T>(old.z, old.w);
          const float(&add)[4] = u[i].at[n];
          at(i, n) = make_float4(fmaf(old.x, decay[n].x, add[0]), fmaf(old.y, decay[n].y, add[1]),
                                 fmaf(old.z, decay[n].x, add[2]), fmaf(old.w, decay[n].y, add[3]));
        }
        fill(u[i], 0.f);
      }
      if (!publishes && warp == 0 && lane_row() == 0) {
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          gate_sum[8 * n + lane_col()] += total[n].x;
          gate_sum[8 * n + lane_col() + 1] += total[n].y;
        }
      }
      if (turn + 1 < chunks) barrier_arrive(next_turn, 2 * kWarpgroup);

      if (publishes) {
        // Through the tile of x, so that neighbouring lanes write whole lines.
#pragma unroll
        for (int i = 0; i < Slabs; ++i) {
#pragma unroll
          for (int n = 0; n < kN; ++n) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              *reinterpret_cast<uint32_t*>(
                  &stage.x(i).at(kRows * warp + lane_row() + 8 * j, 8 * n + lane_col())) = before[i][n][j];
            }
          }
        }
        __syncwarp();
        constexpr int kPacks = Slots / 8;  // a row's, of 16 bytes
        T* const to =
            static_cast<T*>(p.states) + ((first_chunk + chunk_of(turn)) * p.heads + head) * width * p.M;
#pragma unroll
        for (int i = 0; i < Slabs; ++i) {
#pragma unroll
          for (int j = 0; j < kRows * kPacks / 32; ++j) {
            const int row = kRows * warp + lane() / kPacks + j * (32 / kPacks), m = lane() % kPacks * 8;
            if (row < slab[i].cols && m < cols) {
              *reinterpret_cast<uint4*>(to + (slab[i].memory * rows_in_memory0 + slab[i].col + row) * p.M +
                                        col + m) = *reinterpret_cast<const uint4*>(&stage.x(i).at(row, m));
            }
          }
        }
      }
    }
    barrier_wait(mine, kWarpgroup);
    load(step + pass.stages, stage);
    slot = slot + 1 == pass.stages ? 0 : slot + 1;
  }
  wait_copies<0>();

  // The warpgroup that had the last chunk has the last state.
  if (warpgroup != (chunks == 0 ? 0 : (chunks - 1) % pass.warpgroups)) return;
  if (!publishes) {
    for_each_element([&](float element, int memory, int row, int m) {
      pass.segment_states[segment_state + (memory * rows_in_memory0 + row) * p.M + m] = element;
    });
    if (group == 0 && warp == 0 && lane_row() == 0) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const int m = 8 * n + lane_col();
        float* const to = pass.segment_decay + (number * p.heads + head) * p.M + col + m;
        if (m < cols) to[0] = gate_sum[m], to[1] = gate_sum[m + 1];
      }
    }
  } else if (nothing_follows) {
    for_each_element([&](float element, int memory, int row, int m) {
      const Out<4>& final = p.memory[memory].final;
      if (final.data == nullptr) return;
      static_cast<float*>(final.data)[sequence.index * final.stride[0] + head * final.stride[1] +
                                      row * final.stride[2] + m * final.stride[3]] = element;
    });
  }
}

}  // namespace girih::kernels::gsa
