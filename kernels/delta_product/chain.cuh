// What the kernels share: how what was prepared lies, and of the scans of both directions a block's part of a
// state and its stages.
#pragma once

#include <algorithm>
#include <type_traits>

#include "delta_product/delta_product.h"
#include "delta_product/pass.h"
#include "tile/grid.h"
#include "tile/launch.h"
#include "tile/matrix.h"
#include "tile/row_store.h"
#include "tile/shared.h"
#include "tile/warpgroup.h"

namespace girih::kernels::delta_product {

// What the warpgroups of a block of so many threads have of registers at the start, a thread of each.
__host__ __device__ constexpr int registers_of(int threads) {
  return threads / 128 * (65536 / threads / 8 * 8);
}

constexpr int kLoaders = 2;    // warps
constexpr int kTileRows = 16;  // of a warp's products
constexpr int kTilesDown = kDeltaRows / kTileRows;

// Of the block (i, j) of X, j <= i, among the ten.
__host__ __device__ constexpr int block_of(int i, int j) { return i * (i + 1) / 2 + j; }

// The factors of a chunk's rows.
struct Vectors {
  const float* data;

  __device__ float element(int vector, int at) const { return data[vector * kDeltaRows + at]; }
  // The lane's two of eight elements from `at` on.
  __device__ float2 pair(int vector, int at) const {
    return *reinterpret_cast<const float2*>(data + vector * kDeltaRows + at + lane_col());
  }
};

// Those of the lane's rows among a product's columns.
struct RowFactors {
  float2 at[kDeltaRows / 8];

  RowFactors() = default;
  __device__ RowFactors(const Vectors& vectors, int vector) {
#pragma unroll
    for (int i = 0; i < kDeltaRows / 8; ++i) at[i] = vectors.pair(vector, 8 * i);
  }
};

// What was prepared of a chunk and head, in shared memory up to what rounding took from X.
struct Prepared {
  const unsigned char* data;

  // The block (i, j) of X: as a left factor, or the four matrices transposed.
  __device__ void load(uint32_t (&x)[4], int i, int j) const { load_matrices(x, block(i, j)); }
  __device__ bool keeps() const { return *reinterpret_cast<const float*>(data + kDeltaFlag) != 0.f; }
  __device__ bool divides() const { return *reinterpret_cast<const float*>(data + kDeltaDivides) != 0.f; }
  __device__ Vectors vectors() const { return {reinterpret_cast<const float*>(data + kDeltaInverseBytes)}; }

 private:
  __device__ uint32_t block(int i, int j) const {
    return shared_address(data + block_of(i, j) * 512 + lane() * 16);
  }
};

// Where it lies in global memory; `number`: of the chunk and head among all.
template <typename Number>
__device__ inline const unsigned char* prepared_at(const void* prepared, Number number) {
  return static_cast<const unsigned char*>(prepared) + number * kDeltaPreparedBytes;
}
__device__ inline const unsigned char* prepared_at(const void* prepared, const DeltaShape& shape,
                                                   int64_t chunk, int head) {
  return prepared_at(prepared, chunk * shape.heads + head);
}

// Whether what is rounded may have a factor in it that is put in, or taken out, elsewhere. (fp16 has no
// exponents for that: small elements would lose digits.)
template <typename T>
constexpr bool kHasRange = std::is_same_v<T, __nv_bfloat16>;
// Whether reverse leaves dv = beta G in place of G; p: of reverse or the gradients.
template <typename T, class Pass>
__device__ inline bool divides(const Pass& p, const Prepared& prepared) {
  return kHasRange<T> && p.in_place && prepared.divides();
}

// What rounding took from the block (i, j) of X.
__device__ inline void load_lost(uint32_t (&x)[4], const unsigned char* prepared, int i, int j) {
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    x[m] = reinterpret_cast<const uint32_t*>(prepared + kDeltaLost + block_of(i, j) * 512 + m * 128)[lane()];
  }
}

// The blocks of X in shared memory as the products of a chain take them: first those of rows 0 to 31, then
// those of the others, by 16 columns, with the zeros right of the diagonal that they need to be squares of
// 32; of each 16 columns the four 8 x 8 matrices of the first 8, then those of the others.
struct InverseRows {
  static constexpr int kBytes = 12 * 512;
  static constexpr int kNext = 512;  // from 8 columns to the others

  const unsigned char* data;

  __host__ __device__ static constexpr int block(int i, int j) {
    return 2048 * (i / 2) + 1024 * j + 256 * (i % 2);
  }

  // As a left factor, or the four matrices transposed.
  __device__ void load(uint32_t (&x)[4], int i, int j) const { load_matrices(x, of_lane(i, j)); }
  __device__ void load_transposed(uint32_t (&x)[4], int i, int j) const {
    load_matrices_transposed(x, of_lane(i, j));
  }

 private:
  __device__ uint32_t of_lane(int i, int j) const {
    return shared_address(data + block(i, j) + (lane() >> 4) * kNext + (lane() & 15) * 16);
  }
};

// A chunk's rows of a block's columns.
template <typename T>
using Values = SharedTile<T, kDeltaRows, kScanColumns>;

// A chunk's keys, what was prepared of it and, in the scan, v.
template <typename T, int D, bool HasValues = true>
struct Stage {
  using K = BlockTile<T, D>;
  using V = Values<T>;
  static constexpr int kInverse = K::kBytes + (HasValues ? V::kBytes : 0),
                       kPrepared = kInverse + InverseRows::kBytes - kDeltaInverseBytes;
  static constexpr int kBytes = (kPrepared + kDeltaLost + 1023) / 1024 * 1024;

  unsigned char* data;

  __device__ K k() const { return {reinterpret_cast<T*>(data)}; }
  __device__ V v() const {
    static_assert(HasValues);
    return {reinterpret_cast<T*>(data + K::kBytes)};
  }
  __device__ InverseRows inverse() const { return {data + kInverse}; }
  __device__ Prepared prepared() const { return {data + kPrepared}; }

  // Fills a stage, but for what stands beside the keys; a thread's share.
  class Loader {
    static constexpr int kThreads = 32 * kLoaders;
    TileCopier<kThreads, K> k_;
    int thread_;

   public:
    __device__ Loader(const T* k, int64_t stride, int cols, int thread)
        : k_(k, stride, cols, thread), thread_(thread) {}

    __device__ void start(const Stage& stage, int first, int rows, const unsigned char* prepared) const {
      k_.start(stage.k(), first, rows);
      const uint32_t inverse = shared_address(stage.data + kInverse),
                     to = shared_address(stage.data + kPrepared + thread_ * 16);
      const unsigned char* const from = prepared + thread_ * 16;
      // Two warps bring two blocks of X at a time.
      copy_async(inverse + place(0, 1, 2, 3), from, false);
#pragma unroll
      for (int i = 0; i < kDeltaLost; i += kThreads * 16) {
        if (i + thread_ * 16 >= kDeltaLost) continue;
        const int one = i / 512, other = one + 1;
        const bool inverts = i < kDeltaInverseBytes;
        copy_async(inverts ? inverse + place(row_of(one), one - block_of(row_of(one), 0), row_of(other),
                                             other - block_of(row_of(other), 0))
                           : to + i,
                   from + i, true);
      }
    }

   private:
    static_assert(kLoaders == 2 && kDeltaInverseBytes % 1024 == 0, "");

    __device__ static constexpr int row_of(int block) {
      return block < 1 ? 0 : block < 3 ? 1 : block < 6 ? 2 : 3;
    }
    // Where the thread's pack of its warp's block goes.
    __device__ int place(int i0, int j0, int i1, int j1) const {
      return (thread_ < 32 ? InverseRows::block(i0, j0) : InverseRows::block(i1, j1)) +
             thread_ / 16 % 2 * InverseRows::kNext + thread_ % 16 * 16;
    }
  };
};

// A warp's 16 columns of U or G, transposed: 32 of a chunk's rows, and the others. Products of 48 and of 16
// rows, of which X is made up too, have the compiler wait for each.
using Halves = Sums<4>[2];

template <typename T>
__device__ inline void round_to(Operand<kTilesDown>& a, const Halves& sums) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    Operand<2> part;
    round_to<T>(part, sums[half]);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a.at[2 * half + k][i] = part.at[k][i];
    }
  }
}

// sums *= factors, `factors(row)` those of the lane's two of eight rows from `row` on.
template <class Factors>
__device__ inline void scale_chunk_rows(Halves& sums, const Factors& factors) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    scale_columns(sums[half], [&](int i) { return factors(32 * half + 8 * i); });
  }
}

// A warp's 16 columns of a state in fp32, transposed, by 64 of its rows.
template <int D>
struct State {
  static constexpr int kSlabs = D / 64;
  Sums<8> slab[kSlabs];
};

template <int D>
__device__ inline void begin(State<D>& s) {
#pragma unroll
  for (int i = 0; i < State<D>::kSlabs; ++i) fence_products(s.slab[i]);
}
// Waits for all products under way but the latest `Pending`.
template <int Pending, int D>
__device__ inline void finish(State<D>& s) {
#pragma unroll
  for (int i = 0; i < State<D>::kSlabs; ++i) wait_products<Pending>(s.slab[i]);
}

// The state as the products of a chunk take it, rounded: all of it, or, where D = 256 leaves no registers for
// that, a slab at a time, rounded again for every product.
template <typename T, int D>
struct RoundedState {
  static constexpr int kSlabs = State<D>::kSlabs;
  static constexpr bool kWhole = D < 256;

  Operand<4> slab[kWhole ? kSlabs : 1];

  __device__ void take(const State<D>& s) {
#pragma unroll
    for (int i = 0; i < kSlabs; ++i) {
      if (kWhole) round_to<T>(slab[i], s.slab[i]);
    }
  }
  // sums = S^T keys^T, or with `Add` sums += S^T keys^T; under way afterwards where the state is whole.
  // beside(i, slab i): done meanwhile.
  template <bool Add = false, class Beside>
  __device__ void start_read(Sums<8>& sums, const State<D>& s, const BlockTile<T, D>& keys,
                             const Beside& beside) {
    if constexpr (Add) {
      fence_products(sums);
    } else {
      fence_products();
    }
#pragma unroll
    for (int i = 0; i < kSlabs; ++i) {
      Operand<4>& a = slab[kWhole ? i : 0];
      if (!kWhole) round_to<T>(a, s.slab[i]);
      if (!kWhole) fence_products();
      if (i == 0) start_product_transposed<T, Add>(sums, a, keys, 0);
      if (i > 0) start_product_transposed<T, true>(sums, a, keys, 64 * i);
      if (!kWhole || i + 1 == kSlabs) commit_products();
      if (!kWhole) beside(i, a);
      if (!kWhole) wait_products<0>(sums);
    }
#pragma unroll
    for (int i = 0; i < kSlabs; ++i) {
      if (kWhole) beside(i, slab[kWhole ? i : 0]);
    }
  }
  template <bool Add = false>
  __device__ void start_read(Sums<8>& sums, const State<D>& s, const BlockTile<T, D>& keys) {
    start_read<Add>(sums, s, keys, [](int, const Operand<4>&) {});
  }
  // Behind the wait for start_read's products.
  __device__ void keep() const {
#pragma unroll
    for (int i = 0; i < kSlabs; ++i) {
      if (kWhole) kernels::keep(slab[i]);
    }
  }
  // A row of `slot` a column of the state; warp `warp` has 16.
  template <class Tile>
  __device__ void leave(const State<D>& s, const Tile& slot, int warp) {
#pragma unroll
    for (int i = 0; i < kSlabs; ++i) {
      Operand<4>& a = slab[kWhole ? i : 0];
      if (!kWhole) round_to<T>(a, s.slab[i]);
      store_blocks(slot, 16 * warp, 64 * i, a);
    }
  }
};

// S^T <- S^T + update K, or with `Sign` -1 S^T - update K, under way afterwards.
template <typename T, int Sign = 1, int D>
__device__ inline void start_update(State<D>& s, const Operand<kTilesDown>& update,
                                    const BlockTile<T, D>& keys) {
  begin(s);
#pragma unroll
  for (int i = 0; i < State<D>::kSlabs; ++i) start_product<T, Sign>(s.slab[i], update, keys, 64 * i);
  commit_products();
}

template <int D>
__device__ inline void scale(State<D>& s, float by) {
#pragma unroll
  for (int i = 0; i < State<D>::kSlabs; ++i) scale_rows(s.slab[i], {by, by});
}

// A warp's 16 columns of a chunk's rows, transposed, as load_block_transposed gives them.
using ColumnBlocks = uint32_t[kTilesDown][4];

template <typename T>
__device__ inline void widen(Sums<8>& sums, const ColumnBlocks& blocks) {
#pragma unroll
  for (int j = 0; j < kTilesDown; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = unpaired<T>(blocks[j][i]);
      sums.at[2 * j + i / 2][i % 2 * 2] = pair.x, sums.at[2 * j + i / 2][i % 2 * 2 + 1] = pair.y;
    }
  }
}

// The transpose of what a warp has rounded, to its 16 columns of a slot.
template <int K, class Tile>
__device__ inline void leave_transposed(const Tile& slot, const Operand<K>& a, int warp) {
#pragma unroll
  for (int k = 0; k < K; ++k) store_block_transposed(slot, 16 * warp, 16 * k, a.at[k]);
}

// A sequence's chunks, where sequences are not packed.
inline Divider chunks_of_each(const DeltaShape& shape) {
  return Divider(std::max<int64_t>(divide_up(shape.tokens.tokens, delta_chunk(shape.n)), 1));
}
// As piece_at(); of sequences that are not packed `each` pieces a sequence.
__device__ inline Piece chunk_at(const Tokens& all, int64_t number, int tokens, const Divider& each) {
  if (is_packed(all)) return piece_at(all, number, tokens);
  const uint32_t row = each.divide(static_cast<uint32_t>(number));
  const Sequence sequence = sequence_at(all, row);
  const int64_t index = static_cast<uint32_t>(number) - row * each.by,
                start = sequence.start + index * tokens;
  return {sequence, index, start, static_cast<int>(clamp(sequence.end - start, 0, tokens))};
}

// Which tokens of which state a block has.
struct Part {
  Piece piece;
  int64_t number;  // of the state, initial and final
  int64_t chunk;   // the number of its first chunk
  int head, col;   // first column
  int chunks;
  bool transition;
  bool opens, last;  // nothing comes before, nothing follows
};

// Whether a block has the same columns of the state and of the transition, one part each. The transition has
// no values: with one of each in every block all take equally long (1 x 32768 tokens, 8 heads of 128: 219 us
// instead of 227).
__device__ inline bool pairs_transitions(const DeltaShape& shape, const Walk& walk, int of) {
  return walk.alone && of == 2 && divide_up(shape.V, kScanColumns) == divide_up(shape.D, kScanColumns);
}

// Of a block that has `of` of them, number `which`; where it has none of that number, none after it either.
__device__ inline bool part_of(const DeltaShape& shape, const Walk& walk, unsigned block, Part& part,
                               int which = 0, int of = 1) {
  const auto groups_of = [](int cols) { return (cols + kScanColumns - 1) / kScanColumns; };
  const int values = groups_of(shape.V), groups = values + (walk.alone ? groups_of(shape.D) : 0),
            blocks = (groups + of - 1) / of;
  const unsigned job = block / blocks, number = walk.heads.divide(job);
  const int group = static_cast<int>(block - job * blocks) * of + which;
  if (group >= groups) return false;
  part.head = static_cast<int>(job - number * walk.heads.by);
  part.number = number;
  const bool pairs = pairs_transitions(shape, walk, of);
  part.transition = pairs ? which == 1 : group >= values;
  part.col = (pairs ? group / 2 : part.transition ? group - values : group) * kScanColumns;
  bool starts = true, ends = true;
  if (shape.tokens.cu_seqlens == nullptr) {
    // All of a block waits for what its part is: half a microsecond less without the divisions below.
    const unsigned sequence = walk.segments.divide(number), index = number - sequence * walk.segments.by;
    const int64_t before = index * walk.segment_chunks;
    part.piece = {sequence_at(shape.tokens, sequence), index, index * walk.segment, 0};
    part.chunks = static_cast<int>(min(walk.segment_chunks, walk.chunks - before));
    part.chunk = sequence * walk.chunks + before;
    starts = index == 0, ends = index + 1 == walk.segments.by;
  } else {
    const int tokens = delta_chunk(shape.n);
    int64_t length;
    if (walk.segment == 0) {
      const Sequence sequence = sequence_at(shape.tokens, number);
      part.piece = {sequence, 0, sequence.start, 0};
      length = sequence.end - sequence.start;
    } else {
      part.piece = piece_at(shape.tokens, number, walk.segment);
      length = part.piece.length;
      if (length == 0 && part.piece.index != 0) return false;
      starts = part.piece.index == 0, ends = part.piece.start + length == part.piece.sequence.end;
    }
    part.chunks = static_cast<int>((length + tokens - 1) / tokens);
    part.chunk = first_piece(shape.tokens, part.piece.sequence, tokens) +
                 (part.piece.start - part.piece.sequence.start) / tokens;
  }
  part.opens = walk.reverse ? ends : starts;
  part.last = walk.reverse ? starts : ends;
  return !(walk.alone && (part.last || (part.transition && part.opens)));
}

// f(element, its place) for those of the lane's elements that exist, in an array whose rows are the state's
// and whose columns begin at `first`. Places move on from one to the next: with each worked out by itself, a
// block's end waited for instructions that are run once, a tenth of the scan's time at 32 chunks.
template <int D, class Place, class F>
__device__ inline void for_each_of_state(State<D>& s, const DeltaShape& shape, const Part& part,
                                         int first_col, Place* first, int64_t by_row, int64_t by_col,
                                         const F& f) {
  const int cols = part.transition ? shape.D : shape.V, col = first_col + lane_row();
  const int rows = shape.D - lane_col();
  const bool has[2] = {col < cols, col + 8 < cols};
  first += lane_col() * by_row + col * by_col;
  Place* next = first + by_row;
#pragma unroll
  for (int i = 0; i < D / 8; ++i) {
    float(&x)[4] = s.slab[i / 8].at[i % 8];
    if (has[0] && 8 * i < rows) f(x[0], first[0]);
    if (has[0] && 8 * i + 1 < rows) f(x[1], next[0]);
    if (has[1] && 8 * i < rows) f(x[2], first[8 * by_col]);
    if (has[1] && 8 * i + 1 < rows) f(x[3], next[8 * by_col]);
    first += 8 * by_row, next += 8 * by_row;
  }
}

template <int D>
__device__ inline void start_state(State<D>& s, const DeltaShape& shape, const Walk& walk, const Part& part,
                                   int first_col, const In<4>& initial) {
#pragma unroll
  for (int i = 0; i < State<D>::kSlabs; ++i) fill(s.slab[i], 0.f);
  if (part.transition) {
    const int col = first_col + lane_row();
#pragma unroll
    for (int i = 0; i < D / 8; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int d = 8 * i + lane_col() + j % 2;
        s.slab[i / 8].at[i % 8][j] = d == col + j / 2 * 8 && d < shape.D ? 1.f : 0.f;
      }
    }
  } else if (initial.data != nullptr && (part.opens || !walk.alone)) {
    const int64_t number = walk.alone ? part.piece.sequence.index : part.number;
    const float* from =
        static_cast<const float*>(initial.data) + number * initial.stride[0] + part.head * initial.stride[1];
    for_each_of_state(s, shape, part, first_col, from, initial.stride[2], initial.stride[3],
                      [](float& x, const float& at) { x = at; });
  }
}

template <int D>
__device__ inline void end_state(State<D>& s, const DeltaShape& shape, const Walk& walk, const Part& part,
                                 int first_col, const Out<4>& final) {
  if (!part.last && !walk.alone) return;
  const int64_t number = walk.alone ? part.number : part.piece.sequence.index;
  float* to = static_cast<float*>(final.data) + number * final.stride[0] + part.head * final.stride[1];
  if (part.transition) to += shape.V * final.stride[3];
  for_each_of_state(s, shape, part, first_col, to, final.stride[2], final.stride[3],
                    [](float x, float& at) { at = x; });
}

// Blocks of a walk, each of which has `of` parts.
inline int64_t blocks_of(const DeltaShape& shape, const Walk& walk, int of = 1) {
  const int64_t pieces = walk.segment == 0 ? shape.tokens.sequences : piece_count(shape.tokens, walk.segment);
  const int64_t groups =
      divide_up(shape.V, kScanColumns) + (walk.alone ? divide_up(shape.D, kScanColumns) : 0);
  return pieces * shape.heads * divide_up(groups, of);
}

// Parts of a walk of segments alone that are not left out, where a sequence has two or more.
inline int64_t parts_alone(const DeltaShape& shape, const Walk& walk) {
  const int64_t values = divide_up(shape.V, kScanColumns), keys = divide_up(shape.D, kScanColumns);
  return blocks_of(shape, walk) - shape.tokens.sequences * shape.heads * (values + 2 * keys);
}

// Tokens of the part's chunk c.
__device__ inline int tokens_in(const Part& part, int tokens, int c) {
  const int64_t left = part.piece.sequence.end - part.piece.start - static_cast<int64_t>(c) * tokens;
  return left < tokens ? static_cast<int>(left) : tokens;
}

// The first element of a head's columns from `col` on.
template <typename T, template <int> class Array>
__device__ inline auto at(const Array<4>& array, int64_t batch, int64_t row, int64_t head, int64_t col) {
  using Data = std::conditional_t<std::is_same<Array<4>, In<4>>::value, const T, T>;
  return static_cast<Data*>(array.data) + batch * array.stride[0] + row * array.stride[1] +
         head * array.stride[2] + col;
}

// The row of column `col` of a chunk's state: [pieces, H, V, D].
template <typename T, typename Number>
__device__ inline T* state_at(T* states, const DeltaShape& shape, Number number, int col) {
  return states + (number * shape.V + col) * shape.D;
}
template <typename T>
__device__ inline T* state_at(T* states, const DeltaShape& shape, int64_t chunk, int head, int col) {
  return state_at(states, shape, chunk * shape.heads + head, col);
}

// A warp's 16 rows from `row` on, to global memory; To: T or float.
template <typename To, typename T, int N>
__device__ inline void store_rows(const Sums<N>& sums, To* to, int64_t stride, int row, int rows, int cols) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int r = row + lane_row() + 8 * i;
    To* const of_row = to + r * stride;
    if constexpr (std::is_same<To, float>::value) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const int col = 8 * n + lane_col();
        if (r >= rows || col >= cols) continue;
        *reinterpret_cast<float2*>(of_row + col) = {sums.at[n][2 * i], sums.at[n][2 * i + 1]};
      }
    } else {
      static_assert(N % 4 == 0, "a lane stores eight of 32 columns");
#pragma unroll
      for (int n = 0; n < N; n += 4) {
        uint32_t pack[4];
#pragma unroll
        for (int m = 0; m < 4; ++m) pack[m] = pair_of<T>(sums.at[n + m][2 * i], sums.at[n + m][2 * i + 1]);
        turn_quad(pack);
        const int col = 8 * n + 4 * lane_col();
        if (r >= rows || col >= cols) continue;
        store_pack(of_row + col, pack);
      }
    }
  }
}

}  // namespace girih::kernels::delta_product
