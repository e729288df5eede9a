// dx and dg of a segment of kChunk tokens, from A before the segment and G after it (exact.h). The matrices
// of a block are A^T and G^T, in the layout of the stored states: dx is a sum over slots.
//
// The block passes over the tokens twice. Pass 1 with A starts at the start of the chunk of the segment's
// first token, which may lie one segment earlier. Pass 2 with G starts at the last token of the segment, and
// includes all tokens of chunks that start in the segment, which may end in the next one.
#include "trellis/exact_memory.cuh"

namespace girih::kernels {
namespace trellis {
namespace {

// A sum, and the sum of the magnitudes of its terms.
struct Sum {
  float value = 0.f, size = 0.f;

  __device__ void add(float term) { value += term, size += fabsf(term); }
  __device__ void add(const Sum& other) { value += other.value, size += other.size; }
};

template <class Sizes>
struct Columns {
  const TrellisExactColumns& p;
  const TrellisExactShape& shape;
  const int run, group, memory, head;
  const int64_t number;  // index of the segment
  const Piece piece;
  const int chunk, begun;
  // Token 0 is the first token of the segment. The segment has tokens 0..size-1, and the sequence has tokens
  // begin..end-1, clamped to kChunk before the segment and 2 kChunk after its start.
  const int size, begin, end;
  float* const shared;  // rows of tokens, with dx; decays; sums of the warps
  Window<int> window;
  int made_from = 0, made_to = 0;  // tokens whose dx is complete in shared memory
  bool adds = false;               // whether dx is added to global memory

  __device__ Columns(const TrellisExactColumns& p, int run, float* shared)
      : p(p),
        shape(p.shape),
        run(run),
        group(shape.query_heads / shape.heads),
        memory(static_cast<int>(blockIdx.x % shape.memories)),
        head(static_cast<int>(blockIdx.x / shape.memories % shape.heads)),
        number(blockIdx.x / shape.memories / shape.heads),
        piece(piece_at(shape.grid.tokens, number, kChunk)),
        chunk(shape.grid.size),
        begun(shape.grid.position == nullptr
                  ? 0
                  : static_cast<int>(clamp(shape.grid.position[piece.sequence.index], 0, chunk - 1))),
        size(piece.length),
        begin(-static_cast<int>(min(piece.index, int64_t{1})) * kChunk),
        end(static_cast<int>(min(piece.sequence.end - piece.start, int64_t{2 * kChunk}))),
        shared(shared) {}

  __device__ float* rows(int which) const { return shared + which * run * Sizes::Tile; }
  __device__ float* row(int which, int token) const {
    return shared + (which * run + window.place(token)) * Sizes::Tile;
  }
  enum : int { kAfter, kBefore, kLeft };  // indices of sums
  static constexpr int kX = 0, kS = 1, kDz = 2, kDx = 3;
  __device__ int l(int member) const { return 4 + 2 * member; }
  __device__ int w(int member) const { return 5 + 2 * member; }
  __device__ float* decays() const { return rows(4 + 2 * group); }
  __device__ float* parts() const { return decays() + run; }
  __device__ float decay(int token) const { return decays()[window.place(token)]; }

  __device__ void hold(int first, int end) {
    if (window.has(first, end)) return;
    write_out();
    window.hold(first, end, [&](int token, int count) {
      const int64_t batch = piece.sequence.batch, at = piece.start + token;
      const auto bring_rows = [&](int which, const In<4>& of, int head, int width) {
        bring<Sizes>(rows(which), of, batch, at, count, head, width);
      };
      const auto own = [&](const float* data) {
        return packed_rows(data, shape.grid.tokens, shape.heads, shape.M);
      };
      bring_rows(kX, p.x[memory], head, shape.width(memory));
      bring_rows(kS, own(p.s[memory]), head, shape.M), bring_rows(kDz, own(p.dz[memory]), head, shape.M);
      for (int member = 0; adds && member < group; ++member) {
        bring_rows(l(member), p.l[memory], head * group + member, shape.M);
        bring_rows(w(member), p.w[memory], head * group + member, shape.width(memory));
      }
      bring_numbers<Sizes>(decays(), p.g, batch, at, count, head, [](float x) { return expf(x); });
    });
  }
  // Calls f(first token, one past the last) for runs of tokens, in either direction, after loading their
  // rows.
  template <class F>
  __device__ void each_run(int first, int end, bool back, const F& f) {
    const int runs = (end - first + run - 1) / run;
#pragma unroll 1
    for (int i = 0; i < runs; ++i) {
      const int from = first + (back ? runs - 1 - i : i) * run, to = min(from + run, end);
      hold(from, to);
      f(from, to);
    }
  }
  // Marks dx of tokens first..end-1 as complete; they adjoin the tokens that are complete already.
  __device__ void made(int first, int end) {
    const bool none = made_from == made_to;
    made_from = none ? first : min(made_from, first), made_to = none ? end : max(made_to, end);
  }
  __device__ void write_out() {
    if (made_from == made_to) return;
    __syncthreads();
    const int packed = trellis_exact_packed(shape.width(memory)), count = made_to - made_from;
    const In<4> places = packed_rows(nullptr, shape.grid.tokens, shape.heads, shape.width(memory));
    float* const out = p.dx[memory] + offset_of(places, piece.sequence.batch, piece.start + made_from, head);
    const float* const in = row(kDx, made_from);
#pragma unroll 1
    for (int i = threadIdx.x; i < count * Sizes::Tile; i += Sizes::kThreads) {
      const int c = i % Sizes::Tile;
      if (c >= packed) continue;
      float& to = out[i / Sizes::Tile * places.stride[1] + c];
      to = adds ? to + in[i] : in[i];
    }
    made_from = made_to = 0;
    __syncthreads();
  }

  __device__ void load(ExactMatrix<Sizes>& T, const float* states, int64_t number) const {
    const float* const at = states + piece_state(shape, memory, number, head);
    each_published(T, shape, memory, [&](Pack<4>& x, bool exists, int64_t place) {
      x = exists ? kernels::load<4>(at + place) : zeros<4>();
    });
  }
  // Calls f(element, the same element of a caller's state [M, X], or 0 if there is none).
  template <class F>
  __device__ void each_given(ExactMatrix<Sizes>& T, const In<4>& state, const F& f) const {
    const float* const data = static_cast<const float*>(state.data);
    T.each([&](int pack, int e, Pack<4>& x) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int m = T.column(pack) + c, col = T.row + e;
        const bool exists = data != nullptr && m < shape.M && col < shape.width(memory);
        f(x.at[c], exists ? data[offset_of(state, piece.sequence.index, head, m, col)] : 0.f);
      }
    });
  }
  // Stores the sum over the warp.
  __device__ void put(Sum sum, int which) const {
    sum = {over_warp(sum.value), over_warp(sum.size)};
    float* const to = parts() + (which * Sizes::kWarps + warp_index()) * 2;
    if (lane() == 0) to[0] = sum.value, to[1] = sum.size;
  }
  __device__ Sum part(int which) const {
    Sum sum;
    for (int warp = 0; warp < Sizes::kWarps; ++warp) {
      const float* const of = parts() + (which * Sizes::kWarps + warp) * 2;
      sum.add(Sum{of[0], of[1]});
    }
    return sum;
  }
  __device__ void multiply(ExactMatrix<Sizes>& T, const float* states, int which) const {
    const float* const at = states + piece_state(shape, memory, number, head);
    Sum sum;
    each_published(T, shape, memory, [&](Pack<4>& x, bool exists, int64_t place) {
      const Pack<4> y = exists ? kernels::load<4>(at + place) : zeros<4>();
#pragma unroll
      for (int c = 0; c < 4; ++c) sum.add(x.at[c] * y.at[c]);
    });
    put(sum, which);
  }
  // The chunk from `start` on is the incomplete last chunk of the sequence: its A' is a result of the call.
  __device__ bool is_left(int start) const { return start + chunk > end; }

  // dx = A'^T dz. Afterwards T is A after the segment.
  __device__ void forward(ExactMatrix<Sizes>& T) {
    const int ahead = max(run / chunk - 1, 0) * chunk;  // tokens of further chunks that fit in the window
    int start = -static_cast<int>((piece.index * kChunk + begun) % chunk);  // start of the chunk of token 0
    bool goes_on = shape.grid.position != nullptr && piece.index == 0;
    if (goes_on) {
      each_given(T, p.first[memory], [](float& x, float given) { x = given; });
    } else {
      load(T, p.states[memory], number + (start < 0 ? -1 : 0));
      if (start < 0) write(T, begin, start);
    }
#pragma unroll 1
    for (; start < size; start += chunk) {
      const int first = goes_on ? 0 : start, stop = min(start + chunk, size);
      const int several = min(start + chunk + ahead, size);
      if (p.dg != nullptr && start > 0 && is_left(start)) {
        Sum sum;
        each_given(T, p.dlast_first[memory], [&](float& x, float given) { sum.add(x * given); });
        put(sum, kLeft);
      }
      if (!window.has(first, stop) && several - first <= run) hold(first, several);
      each_run(max(first, 0), stop, false, [&](int from, int to) {
#pragma unroll 1
        for (int t = from; t < to; ++t) T.multiply(row(kDz, t), row(kDx, t));
        made(from, to);
      });
      if (goes_on) load(T, p.states[memory], number), goes_on = false;
      write(T, first, stop);
    }
    write_out();
  }
  __device__ void write(ExactMatrix<Sizes>& T, int first, int stop) {
    each_run(first, stop, false, [&](int from, int to) {
#pragma unroll 1
      for (int t = from; t < to; ++t) T.add(decay(t), row(kX, t), row(kS, t));
    });
  }

  // dx <- dx + G^T s. Afterwards T is G before the segment, without dz of a chunk that starts with the
  // segment.
  __device__ void back(ExactMatrix<Sizes>& T) {
    adds = true, window = {};
    load(T, p.gradients[memory], number);
    const int ahead = max(run / chunk - 1, 0) * chunk;
    float left = 1.f;  // decay that is not yet applied to G
    int start = size - 1 - static_cast<int>((piece.index * kChunk + size - 1 + begun) % chunk);
#pragma unroll 1
    for (;; start -= chunk) {
      const bool begins = start > 0;
      const int first = max(start, 0), stop = min(start + chunk, size),
                last = begins ? min(start + chunk, end) : stop, several = max(start - ahead, 0);
      if (!window.has(first, last) && last - several <= run) hold(several, last);
      each_run(first, stop, true, [&](int from, int to) {
#pragma unroll 1
        for (int t = to - 1; t >= from; --t) {
          for (int member = 0; member < group; ++member) {
            T.add(left, row(w(member), t), row(l(member), t)), left = 1.f;
          }
          left = decay(t);
          T.multiply(row(kS, t), row(kDx, t));
        }
        made(from, to);
      });
      if (!begins) break;
      each_run(first, last, false, [&](int from, int to) {
#pragma unroll 1
        for (int t = from; t < to; ++t) T.add(left, row(kX, t), row(kDz, t)), left = 1.f;
      });
      if (is_left(start)) {
        each_given(T, p.dlast_first[memory], [](float& x, float given) { x += given; });
      }
    }
    write_out();
    T.scale(left);
  }

  // dg. A gate decays what was written before its token in every read from its token on. With F_t = e^{g_t}
  // G_t.A_{t-1} and c_t = read_t - s_t.ds_t, plus A'.dA' if a chunk starts with token t + 1,
  //
  //     dg_t = F_t = (A.G after the segment) + sum_{j>=t} c_j = (A.G before the segment) - sum_{j<t} c_j
  //
  // Either sum may cancel. The sum with the smaller total magnitude of terms is used
  // (exact/gate_gradient.cu). Each of the first kChunk threads has a token.
  __device__ void gates() {
    const Tokens& all = shape.grid.tokens;
    Sum* const c = reinterpret_cast<Sum*>(shared);  // one for each token
    __syncthreads();
    const int i = static_cast<int>(threadIdx.x);
    const auto place = [&](int heads, int token, int head) {
      return number_place(all, heads, memory, piece.sequence.batch, piece.start + token, head);
    };
    if (i < size) {
      Sum own;
      for (int member = 0; member < group; ++member) {
        own.add(p.reads[place(shape.query_heads, i, head * group + member)]);
      }
      const float gamma = load_any(p.gamma, piece.sequence.batch, piece.start + i, head);
      own.add(-gamma * p.dgamma[place(shape.heads, i, head)]);
      if (i + 1 < size && (piece.index * kChunk + i + 1 + begun) % chunk == 0) {
        for (int j = i + 1; j < min(i + 1 + chunk, end); ++j) own.add(p.started[place(shape.heads, j, head)]);
        if (is_left(i + 1)) own.add(part(kLeft));
      }
      c[i] = own;
    }
    __syncthreads();
    if (i >= size) return;
    Sum before = part(kBefore), after = part(kAfter);
    for (int j = 0; j < i; ++j) before.add(Sum{-c[j].value, c[j].size});
    for (int j = size - 1; j >= i; --j) after.add(c[j]);
    p.dg[place(shape.heads, i, head)] = before.size <= after.size ? before.value : after.value;
  }
};

template <class Sizes>
__global__ void __launch_bounds__(Sizes::kThreads, Sizes::kBlocks)
    trellis_exact_columns_kernel(const __grid_constant__ TrellisExactColumns p, const int run) {
  extern __shared__ __align__(16) float shared[];
  Columns<Sizes> columns(p, run, shared + Sizes::kShared);
  if (columns.piece.length == 0) return;
  ExactMatrix<Sizes> T(shared);
  columns.forward(T);
  if (p.dg != nullptr) columns.multiply(T, p.gradients[columns.memory], Columns<Sizes>::kAfter);
  columns.back(T);
  if (p.dg == nullptr) return;
  columns.multiply(T, p.states[columns.memory], Columns<Sizes>::kBefore);
  columns.gates();
}

}  // namespace
}  // namespace trellis

cudaError_t trellis_exact_columns(const TrellisExactColumns& p, cudaStream_t stream) {
  using namespace trellis;
  const int64_t blocks = p.shape.memories * piece_count(p.shape.grid.tokens, kChunk) * p.shape.heads;
  return by_exact_size(p.shape, [&](auto sizes) {
    using Sizes = decltype(sizes);
    return launch_exact<trellis_exact_columns_kernel<Sizes>, Sizes>(p, blocks, columns_arrays(p.shape),
                                                                    stream);
  });
}

}  // namespace girih::kernels
