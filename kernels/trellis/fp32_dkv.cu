// dx and dg of a segment of kChunk tokens, from A before the segment and G after it (fp32_kernels.h). The
// matrices of a block are A^T and G^T, in the layout of the stored states: dx is a sum over slots.
//
// The block passes over the tokens twice. Pass 1 with A starts at the start of the chunk of the segment's
// first token, which may lie one segment earlier. Pass 2 with G starts at the last token of the segment, and
// includes all tokens of chunks that start in the segment, which may end in the next one.
#include "trellis/fp32_matrix.cuh"

namespace girih::kernels {
namespace trellis {
namespace {

// A sum, and the sum of the magnitudes of its terms.
struct SumWithMagnitude {
  float value = 0.f, size = 0.f;

  __device__ void add(float term) { value += term, size += fabsf(term); }
  __device__ void add(const SumWithMagnitude& other) { value += other.value, size += other.size; }
};

template <class Sizes>
struct DkvBlock {
  const TrellisFp32Dkv& p;
  const TrellisFp32Shape& shape;
  const int window_size, group, memory, head;
  const int64_t number;  // index of the segment
  const TokenRange segment;
  const int chunk, prior_tokens;  // tokens of a chunk; tokens of the first chunk in earlier calls
  // Token 0 is the first token of the segment. The segment has tokens 0..size-1, and the sequence has tokens
  // begin..end-1, clamped to kChunk before the segment and 2 kChunk after its start.
  const int size, begin, end;
  float* const shared;  // rows of tokens, with dx; decays; sums of the warps
  TokenWindow<int> window;
  int dx_begin = 0, dx_end = 0;  // tokens whose dx is complete in shared memory
  bool accumulates = false;      // whether dx is added to global memory

  __device__ DkvBlock(const TrellisFp32Dkv& p, int window_size, float* shared)
      : p(p),
        shape(p.shape),
        window_size(window_size),
        group(shape.query_heads / shape.heads),
        memory(static_cast<int>(blockIdx.x % shape.memories)),
        head(static_cast<int>(blockIdx.x / shape.memories % shape.heads)),
        number(blockIdx.x / shape.memories / shape.heads),
        segment(token_range_at(shape.grid.tokens, number, kChunk)),
        chunk(shape.grid.size),
        prior_tokens(
            shape.grid.position == nullptr
                ? 0
                : static_cast<int>(clamp(shape.grid.position[segment.sequence.index], 0, chunk - 1))),
        size(segment.length),
        begin(-static_cast<int>(min(segment.index, int64_t{1})) * kChunk),
        end(static_cast<int>(min(segment.sequence.end - segment.start, int64_t{2 * kChunk}))),
        shared(shared) {}

  __device__ float* rows(int which) const { return shared + which * window_size * Sizes::Tile; }
  __device__ float* row(int which, int token) const {
    return shared + (which * window_size + window.row_of_token(token)) * Sizes::Tile;
  }
  // Sums of products of states: A.G after the segment, A.G before it, and A'.dA' of the incomplete last
  // chunk.
  enum : int { kAfter, kBefore, kIncomplete };
  static constexpr int kX = 0, kS = 1, kDz = 2, kDx = 3;
  __device__ int l(int member) const { return 4 + 2 * member; }
  __device__ int w(int member) const { return 5 + 2 * member; }
  __device__ float* decays() const { return rows(4 + 2 * group); }
  __device__ float* parts() const { return decays() + window_size; }
  __device__ float decay(int token) const { return decays()[window.row_of_token(token)]; }

  __device__ void load_window(int first, int end) {
    if (window.has(first, end)) return;
    store_dx();
    window.load_window(first, end, [&](int token, int count) {
      const int64_t batch = segment.sequence.batch, at = segment.start + token;
      const auto load_tensor = [&](int which, const InputTensor<4>& x, int head, int width) {
        load_rows<Sizes>(rows(which), x, batch, at, count, head, width);
      };
      const auto own = [&](const float* data) {
        return padded_rows(data, shape.grid.tokens, shape.heads, shape.M);
      };
      load_tensor(kX, p.x[memory], head, shape.width(memory));
      load_tensor(kS, own(p.s[memory]), head, shape.M), load_tensor(kDz, own(p.dz[memory]), head, shape.M);
      for (int member = 0; accumulates && member < group; ++member) {
        load_tensor(l(member), p.l[memory], head * group + member, shape.M);
        load_tensor(w(member), p.w[memory], head * group + member, shape.width(memory));
      }
      load_scalars<Sizes>(decays(), p.g, batch, at, count, head, [](float x) { return expf(x); });
    });
  }
  // Calls f(first token, one past the last) for runs of tokens, in either direction, after loading their
  // rows.
  template <class F>
  __device__ void each_run(int first, int end, bool is_backward, const F& f) {
    const int runs = (end - first + window_size - 1) / window_size;
#pragma unroll 1
    for (int i = 0; i < runs; ++i) {
      const int from = first + (is_backward ? runs - 1 - i : i) * window_size,
                to = min(from + window_size, end);
      load_window(from, to);
      f(from, to);
    }
  }
  // Marks dx of tokens first..end-1 as complete; they adjoin the tokens that are complete already.
  __device__ void mark_dx(int first, int end) {
    const bool none = dx_begin == dx_end;
    dx_begin = none ? first : min(dx_begin, first), dx_end = none ? end : max(dx_end, end);
  }
  __device__ void store_dx() {
    if (dx_begin == dx_end) return;
    __syncthreads();
    const int packed = trellis_fp32_padded_width(shape.width(memory)), count = dx_end - dx_begin;
    const InputTensor<4> layout = padded_rows(nullptr, shape.grid.tokens, shape.heads, shape.width(memory));
    float* const out =
        p.dx[memory] + offset_of(layout, segment.sequence.batch, segment.start + dx_begin, head);
    const float* const in = row(kDx, dx_begin);
#pragma unroll 1
    for (int i = threadIdx.x; i < count * Sizes::Tile; i += Sizes::kThreads) {
      const int c = i % Sizes::Tile;
      if (c >= packed) continue;
      float& to = out[i / Sizes::Tile * layout.stride[1] + c];
      to = accumulates ? to + in[i] : in[i];
    }
    dx_begin = dx_end = 0;
    __syncthreads();
  }

  __device__ void load(Fp32Matrix<Sizes>& T, const float* states, int64_t number) const {
    const float* const at = states + segment_state_offset(shape, memory, number, head);
    for_each_stored_pack(T, shape, memory, [&](Pack<4>& x, bool exists, int64_t place) {
      x = exists ? kernels::load<4>(at + place) : zeros<4>();
    });
  }
  // Calls f(element, the same element of a caller's state [M, X], or 0 if there is none).
  template <class F>
  __device__ void for_each_state_element(Fp32Matrix<Sizes>& T, const InputTensor<4>& state,
                                         const F& f) const {
    const float* const data = static_cast<const float*>(state.data);
    T.each([&](int pack, int e, Pack<4>& x) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int m = T.column(pack) + c, col = T.row + e;
        const bool exists = data != nullptr && m < shape.M && col < shape.width(memory);
        f(x.at[c], exists ? data[offset_of(state, segment.sequence.index, head, m, col)] : 0.f);
      }
    });
  }
  // Stores the sum over the warp.
  __device__ void store_sum(SumWithMagnitude sum, int which) const {
    sum = {sum_over_warp(sum.value), sum_over_warp(sum.size)};
    float* const to = parts() + (which * Sizes::kWarps + warp_index()) * 2;
    if (lane() == 0) to[0] = sum.value, to[1] = sum.size;
  }
  __device__ SumWithMagnitude part(int which) const {
    SumWithMagnitude sum;
    for (int warp = 0; warp < Sizes::kWarps; ++warp) {
      const float* const of = parts() + (which * Sizes::kWarps + warp) * 2;
      sum.add(SumWithMagnitude{of[0], of[1]});
    }
    return sum;
  }
  __device__ void add_state_product(Fp32Matrix<Sizes>& T, const float* states, int which) const {
    const float* const at = states + segment_state_offset(shape, memory, number, head);
    SumWithMagnitude sum;
    for_each_stored_pack(T, shape, memory, [&](Pack<4>& x, bool exists, int64_t place) {
      const Pack<4> y = exists ? kernels::load<4>(at + place) : zeros<4>();
#pragma unroll
      for (int c = 0; c < 4; ++c) sum.add(x.at[c] * y.at[c]);
    });
    store_sum(sum, which);
  }
  // The chunk from `start` on is the incomplete last chunk of the sequence: its A' is a result of the call.
  __device__ bool is_incomplete(int start) const { return start + chunk > end; }

  // dx = A'^T dz. Afterwards T is A after the segment.
  __device__ void run_forward(Fp32Matrix<Sizes>& T) {
    const int ahead =
        max(window_size / chunk - 1, 0) * chunk;  // tokens of further chunks that fit in the window
    int start =
        -static_cast<int>((segment.index * kChunk + prior_tokens) % chunk);  // start of the chunk of token 0
    bool is_resumed = shape.grid.position != nullptr && segment.index == 0;
    if (is_resumed) {
      for_each_state_element(T, p.chunk_start[memory], [](float& x, float given) { x = given; });
    } else {
      load(T, p.states[memory], number + (start < 0 ? -1 : 0));
      if (start < 0) update_state(T, begin, start);
    }
#pragma unroll 1
    for (; start < size; start += chunk) {
      const int first = is_resumed ? 0 : start, stop = min(start + chunk, size);
      const int window_end = min(start + chunk + ahead, size);
      if (p.dg != nullptr && start > 0 && is_incomplete(start)) {
        SumWithMagnitude sum;
        for_each_state_element(T, p.dlast_chunk_start[memory],
                               [&](float& x, float given) { sum.add(x * given); });
        store_sum(sum, kIncomplete);
      }
      if (!window.has(first, stop) && window_end - first <= window_size) load_window(first, window_end);
      each_run(max(first, 0), stop, false, [&](int from, int to) {
#pragma unroll 1
        for (int t = from; t < to; ++t) T.multiply(row(kDz, t), row(kDx, t));
        mark_dx(from, to);
      });
      if (is_resumed) load(T, p.states[memory], number), is_resumed = false;
      update_state(T, first, stop);
    }
    store_dx();
  }
  __device__ void update_state(Fp32Matrix<Sizes>& T, int first, int stop) {
    each_run(first, stop, false, [&](int from, int to) {
#pragma unroll 1
      for (int t = from; t < to; ++t) T.add(decay(t), row(kX, t), row(kS, t));
    });
  }

  // dx <- dx + G^T s. Afterwards T is G before the segment, without dz of a chunk that starts with the
  // segment.
  __device__ void run_backward(Fp32Matrix<Sizes>& T) {
    accumulates = true, window = {};
    load(T, p.gradients[memory], number);
    const int ahead = max(window_size / chunk - 1, 0) * chunk;
    float pending_decay = 1.f;  // decay that is not yet applied to G
    int start = size - 1 - static_cast<int>((segment.index * kChunk + size - 1 + prior_tokens) % chunk);
#pragma unroll 1
    for (;; start -= chunk) {
      const bool begins = start > 0;
      const int first = max(start, 0), stop = min(start + chunk, size),
                last = begins ? min(start + chunk, end) : stop, window_end = max(start - ahead, 0);
      if (!window.has(first, last) && last - window_end <= window_size) load_window(window_end, last);
      each_run(first, stop, true, [&](int from, int to) {
#pragma unroll 1
        for (int t = to - 1; t >= from; --t) {
          for (int member = 0; member < group; ++member) {
            T.add(pending_decay, row(w(member), t), row(l(member), t)), pending_decay = 1.f;
          }
          pending_decay = decay(t);
          T.multiply(row(kS, t), row(kDx, t));
        }
        mark_dx(from, to);
      });
      if (!begins) break;
      each_run(first, last, false, [&](int from, int to) {
#pragma unroll 1
        for (int t = from; t < to; ++t) T.add(pending_decay, row(kX, t), row(kDz, t)), pending_decay = 1.f;
      });
      if (is_incomplete(start)) {
        for_each_state_element(T, p.dlast_chunk_start[memory], [](float& x, float given) { x += given; });
      }
    }
    store_dx();
    T.scale(pending_decay);
  }

  // dg. A gate decays what was written before its token in every read from its token on. With F_t = e^{g_t}
  // G_t.A_{t-1} and c_t = read_t - s_t.ds_t, plus A'.dA' if a chunk starts with token t + 1,
  //
  //     dg_t = F_t = (A.G after the segment) + sum_{j>=t} c_j = (A.G before the segment) - sum_{j<t} c_j
  //
  // Either sum may cancel. The sum with the smaller total magnitude of terms is used
  // (fp32/gate_gradient.cu). Each of the first kChunk threads has a token.
  __device__ void store_dg() {
    const SequenceLayout& all = shape.grid.tokens;
    SumWithMagnitude* const c = reinterpret_cast<SumWithMagnitude*>(shared);  // one for each token
    __syncthreads();
    const int i = static_cast<int>(threadIdx.x);
    const auto place = [&](int heads, int token, int head) {
      return token_index(all, heads, memory, segment.sequence.batch, segment.start + token, head);
    };
    if (i < size) {
      SumWithMagnitude own;
      for (int member = 0; member < group; ++member) {
        own.add(p.read_dots[place(shape.query_heads, i, head * group + member)]);
      }
      const float gamma = load_element(p.gamma, segment.sequence.batch, segment.start + i, head);
      own.add(-gamma * p.dgamma[place(shape.heads, i, head)]);
      if (i + 1 < size && (segment.index * kChunk + i + 1 + prior_tokens) % chunk == 0) {
        for (int j = i + 1; j < min(i + 1 + chunk, end); ++j)
          own.add(p.dz_dot_z[place(shape.heads, j, head)]);
        if (is_incomplete(i + 1)) own.add(part(kIncomplete));
      }
      c[i] = own;
    }
    __syncthreads();
    if (i >= size) return;
    SumWithMagnitude before = part(kBefore), after = part(kAfter);
    for (int j = 0; j < i; ++j) before.add(SumWithMagnitude{-c[j].value, c[j].size});
    for (int j = size - 1; j >= i; --j) after.add(c[j]);
    p.dg[place(shape.heads, i, head)] = before.size <= after.size ? before.value : after.value;
  }
};

template <class Sizes>
__global__ void __launch_bounds__(Sizes::kThreads, Sizes::kBlocks)
    trellis_fp32_dkv_kernel(const __grid_constant__ TrellisFp32Dkv p, const int window_size) {
  GIRIH_DYNAMIC_SHARED(float, shared, 16);
  DkvBlock<Sizes> dkv(p, window_size, shared + Sizes::kShared);
  if (dkv.segment.length == 0) return;
  Fp32Matrix<Sizes> T(shared);
  dkv.run_forward(T);
  if (p.dg != nullptr) dkv.add_state_product(T, p.gradients[dkv.memory], DkvBlock<Sizes>::kAfter);
  dkv.run_backward(T);
  if (p.dg == nullptr) return;
  dkv.add_state_product(T, p.states[dkv.memory], DkvBlock<Sizes>::kBefore);
  dkv.store_dg();
}

}  // namespace
}  // namespace trellis

cudaError_t trellis_fp32_dkv(const TrellisFp32Dkv& p, cudaStream_t stream) {
  using namespace trellis;
  const int64_t blocks = p.shape.memories * token_range_count(p.shape.grid.tokens, kChunk) * p.shape.heads;
  return dispatch_fp32_size(p.shape, [&](auto sizes) {
    using Sizes = decltype(sizes);
    return launch_fp32<trellis_fp32_dkv_kernel<Sizes>, Sizes>(p, blocks, dkv_arrays(p.shape), stream);
  });
}

}  // namespace girih::kernels
