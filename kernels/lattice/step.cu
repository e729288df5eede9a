// One token of decoding, with the state updated in place. A memory [D, M] is read once and written once:
//
//     D' = e^{g} Delta + W (h - s (s.h))          x = m s + D', m = e^{max(L', -30)}          o = unit(x) q
//
// If the token completes its chunk, S <- unit(x) and Delta <- 0; else Delta <- D'. Chunks of one token have
// no Delta.
//
// A block has a sequence and head; tile/row_groups.h assigns rows to threads. A thread uses the same elements
// in every pass, so it holds a memory that is not too large in registers.
#include "lattice/lattice.h"
#include "lattice/tokens.cuh"
#include "tile/launch.h"
#include "tile/pack.h"
#include "tile/row_groups.h"
#include "tile/sequence.h"
#include "tile/shared.h"

namespace girih::kernels {
namespace lattice {
namespace {

constexpr int kStepThreads = 256, kStepWarps = kStepThreads / 32;
constexpr int kRowsInFlight = 4;  // rows of a thread whose sums over lanes are computed together

// A pack of a memory: its row, its column, and its index in the thread.
struct PackIndex {
  int r, c, pack;
};

// A memory [D, M] in fp32, in registers if RegisterPacks > 0: then RegisterPacks packs a thread suffice.
template <int Pack_, int RegisterPacks>
struct StepMemory {
  float* global;
  int64_t row_stride, col_stride;  // in registers: row_stride leads to the thread's next pack
  Pack<Pack_> packs[RegisterPacks > 0 ? RegisterPacks : 1];

  // Starts at the thread's pack 0; the next ones are `rows` rows apart.
  __device__ StepMemory(const OutputTensor<4>& state, int64_t n, int head, const PackIndex& first, int rows)
      : global(static_cast<float*>(state.data)), row_stride(state.stride[2]), col_stride(state.stride[3]) {
    if (global != nullptr) global += offset_of(state, n, head);
    if constexpr (RegisterPacks > 0) {
      global += first.r * row_stride + first.c * col_stride;
      row_stride *= rows;
    }
  }
  __device__ float* place(const PackIndex& at) const {
    if constexpr (RegisterPacks > 0) {
      return global + at.pack * row_stride;
    } else {
      return global + at.r * row_stride + at.c * col_stride;
    }
  }
  __device__ void load_to_registers(const PackIndex& at) {
    if constexpr (RegisterPacks > 0) packs[at.pack] = load<Pack_>(place(at));
  }
  __device__ Pack<Pack_> load_pack(const PackIndex& at) const {
    if constexpr (RegisterPacks > 0) {
      return packs[at.pack];
    } else {
      return load<Pack_>(place(at));
    }
  }
  __device__ void store_pack(const PackIndex& at, const Pack<Pack_>& x) const { store<Pack_>(place(at), x); }
};

// The thread's elements of a memory [D, M], and sums over a memory.
template <int Pack_, int RegisterPacks>
struct StepRows : LaneGroups<Pack_, kStepThreads> {
  using Groups = LaneGroups<Pack_, kStepThreads>;
  using Groups::reduce, Groups::col, Groups::cols, Groups::lanes, Groups::row, Groups::rows;
  const LatticeStep& p;
  float* const parts;  // [warps, columns]: floats_of_parts()

  __host__ __device__ static int floats_of_parts(int M) {
    return kStepWarps * Pack_ * Groups::lanes_for_width(M);
  }
  __device__ StepRows(const LatticeStep& p, float* parts) : Groups(p.M), p(p), parts(parts) {}
  __device__ PackIndex first() const { return {row, col, 0}; }
  // Calls f(at) for the thread's packs in the columns from `from` on.
  template <class F>
  __device__ void for_rows(int from, const F& f) const {
    const int c = from + col;
    if constexpr (RegisterPacks > 0) {
#pragma unroll
      for (int pack = 0; pack < RegisterPacks; ++pack) {
        const int r = row + pack * rows;
        if (r < p.D && c < p.M) f(PackIndex{r, c, pack});
      }
    } else {
#pragma unroll 4
      for (int r = row; r < p.D; r += rows) {
        if (c < p.M) f(PackIndex{r, c, 0});
      }
    }
  }
  // Calls f(c, sum over rows), where of(sum, at) adds a pack; called by all threads.
  template <class Of, class F>
  __device__ void sum_rows(const Of& of, const F& f) const {
    for (int from = 0; from < p.M; from += cols) {
      Pack<Pack_> sum = zeros<Pack_>();
      for_rows(from, [&](const PackIndex& at) { of(sum, at); });
      reduce(sum);
      if (lane() < lanes) store<Pack_>(parts + threadIdx.x / 32 * cols + col, sum);
      __syncthreads();
      for (int i = threadIdx.x; i < cols && from + i < p.M; i += kStepThreads) {
        f(from + i, Groups::sum_over_warps(parts + i, cols));
      }
      __syncthreads();
    }
  }
  // to[r] += sum over columns of f(at). All lanes of a group have the same rows.
  template <class F>
  __device__ void sum_columns(float* to, const F& f) const {
    if constexpr (RegisterPacks > 0) {
#pragma unroll
      for (int first = 0; first < RegisterPacks; first += kRowsInFlight) sum_columns_of(to, 0, first, f);
    } else {
      for (int from = 0; from < p.M; from += cols) {
        for (int first = 0; first * rows < p.D; first += kRowsInFlight) sum_columns_of(to, from, first, f);
      }
    }
  }
  // The same for the columns from `from` on and kRowsInFlight rows of the thread, from index `first` on.
  template <class F>
  __device__ void sum_columns_of(float* to, int from, int first, const F& f) const {
    const int c = from + col;
    float sums[kRowsInFlight];
#pragma unroll
    for (int j = 0; j < kRowsInFlight; ++j) {
      const int r = row + (first + j) * rows;
      sums[j] = r < p.D && c < p.M ? f(PackIndex{r, c, first + j}) : 0.f;
    }
    reduce(sums);
#pragma unroll
    for (int j = 0; j < kRowsInFlight; ++j) {
      const int r = row + (first + j) * rows;
      if (col == 0 && r < p.D) to[r] += sums[j];
    }
  }
};

// Position of the token in its chunk, and the gates.
struct TokenPosition {
  bool has_chunk_state, last;  // chunks have more than one token; the token completes its chunk
  int64_t position;
  float sum, memory_decay, decay;  // L', m, e^g

  __device__ TokenPosition(const LatticeStep& p, int64_t n, int head, float g)
      : has_chunk_state(p.step.data != nullptr) {
    const float before =
        p.decay.data == nullptr ? 0.f : static_cast<const float*>(p.decay.data)[offset_of(p.decay, n, head)];
    position = has_chunk_state ? clamp(p.position[n], 0, p.chunk - 1) : 0;
    last = !has_chunk_state || position == p.chunk - 1;
    sum = before + g, memory_decay = expf(fmaxf(sum, -30.f)), decay = expf(g);
  }
  __device__ void store(const LatticeStep& p, int64_t n, int head) const {
    if (p.decay.data != nullptr) store_element(p.decay, last ? 0.f : sum, n, head);
    if (has_chunk_state && head == 0) p.next_position[n] = last ? 0 : position + 1;
  }
};

// The token and memory of a block.
template <int Pack_, int RegisterPacks>
struct StepBlock {
  using ColumnPack = Pack<Pack_>;

  const LatticeStep& p;
  const bool has_chunk_state;
  const int64_t n;
  const int head, group;
  float* parts;            // in shared memory, as the arrays below
  float *a, *W, *rho, *q;  // M each: whole packs
  float *h, *o;            // D each

  const StepRows<Pack_, RegisterPacks> thread_rows;
  StepMemory<Pack_, RegisterPacks> S, Delta;

  __device__ StepBlock(const LatticeStep& p, float* shared)
      : p(p),
        has_chunk_state(p.step.data != nullptr),
        n(blockIdx.x / p.heads),
        head(static_cast<int>(blockIdx.x % p.heads)),
        group(p.query_heads / p.heads),
        parts(shared),
        a(parts + StepRows<Pack_, RegisterPacks>::floats_of_parts(p.M)),
        W(a + p.M),
        rho(W + p.M),
        q(rho + p.M),
        h(q + p.M),
        o(h + p.D),
        thread_rows(p, parts),
        S(p.memory, n, head, thread_rows.first(), thread_rows.rows),
        Delta(p.step, n, head, thread_rows.first(), thread_rows.rows) {}

  __device__ void load_memory() {
    if constexpr (RegisterPacks > 0) {
      thread_rows.for_rows(0, [&](const PackIndex& at) { S.load_to_registers(at); });
      if (has_chunk_state) thread_rows.for_rows(0, [&](const PackIndex& at) { Delta.load_to_registers(at); });
    }
  }
  __device__ bool is(LatticeObjective objective) const { return p.objective == objective; }

  // Loads k to W, where it stays until a is known, and v or -v to h.
  __device__ void load_token() const {
    const bool decode = is(LatticeObjective::decode);
    for (int d = threadIdx.x; d < p.D; d += kStepThreads) {
      const float v = load_element(p.v, n, head, d);
      h[d] = decode ? -v : v;
      o[d] = 0.f;
    }
    for (int m = threadIdx.x; m < p.M; m += kStepThreads) W[m] = load_element(p.k, n, head, m);
  }
  __device__ void load_query(int query_head) const {
    for (int m = threadIdx.x; m < p.M; m += kStepThreads) q[m] = load_element(p.q, n, query_head, m);
  }

  // decode: h = S k - v
  __device__ void read_key() const {
    thread_rows.sum_columns(h, [&](const PackIndex& at) {
      const ColumnPack s = S.load_pack(at), k = load<Pack_>(W + at.c);
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < Pack_; ++i) sum = fmaf(s.at[i], k.at[i], sum);
      return sum;
    });
  }

  // a = S^T h, W = sign gamma c
  __device__ void compute_w(float gamma) const {
    const float step = sign_of(p.objective) * gamma;
    const bool encode = is(LatticeObjective::encode);
    thread_rows.sum_rows(
        [&](ColumnPack& sum, const PackIndex& at) {
          const ColumnPack s = S.load_pack(at);
#pragma unroll
          for (int i = 0; i < Pack_; ++i) sum.at[i] = fmaf(h[at.r], s.at[i], sum.at[i]);
        },
        [&](int m, float total) {
          a[m] = total;
          W[m] = step * (encode ? total - W[m] : W[m]);
        });
  }

  // x = m s + D', D' = e^g Delta + W (h - s a)
  __device__ ColumnPack next_step(const TokenPosition& place, const PackIndex& at,
                                  const ColumnPack& s) const {
    ColumnPack d = zeros<Pack_>();
    const ColumnPack w = load<Pack_>(W + at.c), of_a = load<Pack_>(a + at.c);
    if (has_chunk_state) d = Delta.load_pack(at);
#pragma unroll
    for (int i = 0; i < Pack_; ++i)
      d.at[i] = fmaf(place.decay, d.at[i], w.at[i] * fmaf(-s.at[i], of_a.at[i], h[at.r]));
    return d;
  }
  __device__ ColumnPack add_memory(const TokenPosition& place, const ColumnPack& s,
                                   const ColumnPack& d) const {
    ColumnPack x;
#pragma unroll
    for (int i = 0; i < Pack_; ++i) x.at[i] = fmaf(place.memory_decay, s.at[i], d.at[i]);
    return x;
  }

  // rho = 1 / |x|, or 0 where x is 0. Stores D'; with RegisterPacks, x replaces Delta in registers.
  __device__ void compute_rho(const TokenPosition& place) {
    thread_rows.sum_rows(
        [&](ColumnPack& sum, const PackIndex& at) {
          const ColumnPack s = S.load_pack(at), d = next_step(place, at, s), x = add_memory(place, s, d);
          if (has_chunk_state && (RegisterPacks == 0 || !place.last)) Delta.store_pack(at, d);
          if constexpr (RegisterPacks > 0) Delta.packs[at.pack] = x;
#pragma unroll
          for (int i = 0; i < Pack_; ++i) sum.at[i] = fmaf(x.at[i], x.at[i], sum.at[i]);
        },
        [&](int m, float total) { rho[m] = total > 0.f ? rsqrtf(total) : 0.f; });
  }
  __device__ ColumnPack updated_pack(const TokenPosition& place, const PackIndex& at,
                                     const ColumnPack& s) const {
    if constexpr (RegisterPacks > 0) {
      return Delta.packs[at.pack];
    } else {
      return add_memory(place, s, has_chunk_state ? Delta.load_pack(at) : next_step(place, at, s));
    }
  }

  // o = unit(x) q. If `writes` and the chunk is complete, stores unit(x) and sets Delta to 0.
  __device__ void read(const TokenPosition& place, bool writes) const {
    const bool ends = writes && place.last;
    thread_rows.sum_columns(o, [&](const PackIndex& at) {
      const ColumnPack s = S.load_pack(at), by = load<Pack_>(rho + at.c), read = load<Pack_>(q + at.c);
      ColumnPack x = updated_pack(place, at, s);
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < Pack_; ++i) {
        x.at[i] = by.at[i] > 0.f ? x.at[i] * by.at[i] : s.at[i];
        sum = fmaf(x.at[i], read.at[i], sum);
      }
      if (ends) {
        S.store_pack(at, x);
        if (has_chunk_state) Delta.store_pack(at, zeros<Pack_>());
      }
      return sum;
    });
  }
  // Stores o, and sets o to 0 for the next query head.
  __device__ void store_output(int query_head) const {
    for (int d = threadIdx.x; d < p.D; d += kStepThreads) {
      store_element(p.o, o[d], n, query_head, d);
      o[d] = 0.f;
    }
  }
};

// Resident blocks of a multiprocessor, limited by the registers of the packs.
template <int RegisterPacks>
constexpr int kStepBlocks = RegisterPacks > 4 ? 1 : 3;

template <int Pack_, int RegisterPacks>
__global__ void __launch_bounds__(kStepThreads, kStepBlocks<RegisterPacks>)
    step_kernel(const __grid_constant__ LatticeStep p) {
  GIRIH_DYNAMIC_SHARED(float, shared, 16);
  StepBlock<Pack_, RegisterPacks> block(p, shared);
  const int64_t n = block.n;
  const int head = block.head, group = block.group;
  block.load_memory();
  const float gamma = load_element(p.gamma, n, head),
              g = p.g.data == nullptr ? 0.f : load_element(p.g, n, head);
  const TokenPosition place(p, n, head, g);
  block.load_token();
  block.load_query(head * group);
  __syncthreads();

  if (p.objective == LatticeObjective::decode) {
    block.read_key();
    __syncthreads();
  }
  block.compute_w(gamma);
  block.compute_rho(place);
  // The pass of the last query head stores the state.
  for (int member = 0; member < group; ++member) {
    block.read(place, member + 1 == group);
    __syncthreads();
    block.store_output(head * group + member);
    if (member + 1 == group) break;
    block.load_query(head * group + member + 1);
    __syncthreads();
  }
  if (threadIdx.x == 0) place.store(p, n, head);
}

template <int Pack_, int RegisterPacks>
cudaError_t launch_step(const LatticeStep& p, cudaStream_t stream) {
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  const int64_t floats = 4 * int64_t{p.M} + 2 * p.D + StepRows<Pack_, RegisterPacks>::floats_of_parts(p.M);
  if (floats > limit / static_cast<int64_t>(sizeof(float))) return cudaErrorInvalidValue;
  const int bytes = static_cast<int>(floats * sizeof(float));
  return launch_kernel<step_kernel<Pack_, RegisterPacks>>(p, p.sequences * p.heads, kStepThreads, bytes,
                                                          stream, limit);
}

// Packs of four columns for each thread, or 0 if a row has more packs than its group has lanes.
int packs_of_thread(const LatticeStep& p) {
  const int packs = p.M / 4;
  if (packs > 32) return 0;
  const int rows = kStepThreads / LaneGroups<4, kStepThreads>::lanes_for_width(p.M);
  return (p.D + rows - 1) / rows;
}

}  // namespace
}  // namespace lattice

cudaError_t lattice_step(const LatticeStep& p, cudaStream_t stream) {
  if (p.sequences * p.heads == 0) return cudaSuccess;
  if (p.sequences * p.heads > 0x7fffffff) return cudaErrorInvalidConfiguration;
  if (p.M % 4 != 0 || !is_pack_aligned(p.memory, 4, 4) || !is_pack_aligned(p.step, 4, 4)) {
    return lattice::launch_step<1, 0>(p, stream);
  }
  const int packs = lattice::packs_of_thread(p);
  if (packs == 0 || packs > 16) return lattice::launch_step<4, 0>(p, stream);
  return packs <= 4 ? lattice::launch_step<4, 4>(p, stream) : lattice::launch_step<4, 16>(p, stream);
}

}  // namespace girih::kernels
