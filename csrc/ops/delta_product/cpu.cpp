// DeltaProduct (Siems et al. 2025) in chunk form.
//   S <- e^{g_t} S                                    once per token, before its first step
//   for j < n:  S <- S + k_{t,j} (w_{t,j} - S^T b_{t,j})^T        b = beta k, w = beta v
//   o_t = scale * S_t^T q_t                           after the last step
// A step is one of the n updates of a token. A chunk of C tokens has R = C n rows, one per step. In the
// equations below q, k, b, w and u are the matrices of a chunk with one vector per row, and L_r is the sum of
// the gates from the start of the chunk through row r. Row r writes k_r u_r^T with u_r = w_r - S^T b_r.
#include "../arguments/shared_heads.h"
#include "../chunks/chunks.h"
#include "../chunks/decay.h"
#include "aten.h"

namespace girih::delta_product {
namespace {

// The chunk length without between_chunks; it does not change the result. Chunks of 64 rows are the fastest
// at D = 128 and close to the fastest at D = 32, and autograd saves half as many states as for chunks of 32
// rows.
int64_t choose_chunk_length(int64_t T, int64_t n) {
  return std::max<int64_t>(1, std::min<int64_t>(T, 64 / n));
}

// x / |x| with eps inside the root, so that a zero row stays zero and has a gradient. Computed in float64: if
// a key repeats, every step has the same error of |k|, and with beta = 2 the steps are reflections, whose
// errors add up over T.
Tensor l2_normalize(const Tensor& x) {
  const auto y = x.to(at::kDouble);
  return (y * (y.square().sum(-1, true) + 1e-6).rsqrt()).to(x.scalar_type());
}

// One gate per token -> one gate per row: the gate of the first step of the token, 0 for its other steps.
Tensor expand_gates(const Tensor& g, int64_t n) {
  return at::constant_pad_nd(g.unsqueeze(-1), {0, n - 1}, 0).flatten(-2);
}

// The last of every n rows: a token reads the state after its last step.
Tensor select_read_rows(const Tensor& x, int64_t n) {
  return x.unflatten(-2, {x.size(-2) / n, n}).select(-2, n - 1);
}

// [B, count, H, ...] -> one [B * H, ...] per chunk
std::vector<Tensor> unbind_chunks(const Tensor& x) { return x.transpose(0, 1).flatten(1, 2).unbind(0); }

}  // namespace

Results forward(const Call& call, bool save) {
  const auto problem = Problem::check(call);
  const auto n = call.n;
  const auto H = call.v.size(2);
  const auto q_input = repeat_heads(call.q, H), k_input = repeat_heads(call.k, H);
  const auto B = q_input.size(0), T = q_input.size(1), HO = q_input.size(2), D = q_input.size(3),
             V = call.v.size(3);
  const auto sum_dtype = accumulate_type(q_input);
  const auto options = q_input.options();
  const auto saved_shapes = problem.saved(call, save);
  const auto states = new_saved(saved_shapes.states, options.dtype(saved_shapes.states_type)),
             prepared = new_saved(saved_shapes.prepared, options.dtype(saved_shapes.prepared_type)),
             transitions = new_saved(saved_shapes.transitions, options.dtype(at::kFloat));
  // A single token is computed as a chunk of one token. Its position decides whether between_chunks is
  // applied after it.
  const bool is_single_token = call.between_chunks && T == 1 && !is_defined(call.cu_seqlens);
  const Chunks chunks(q_input, B, T, is_single_token ? 1 : call.chunk.value_or(choose_chunk_length(T, n)),
                      call.cu_seqlens, is_single_token ? std::nullopt : call.state_position,
                      call.between_chunks ? Chunks::Cut::at_start : Chunks::Cut::anywhere);
  const auto count = chunks.count(), C = chunks.length(), R = C * n;
  const auto S0 = is_defined(call.state_s)
                      ? *call.state_s
                      : at::zeros({chunks.sequences(), H, D, V}, q_input.options().dtype(sum_dtype));
  Tensor has_chunk_end;  // [B, count]: whether between_chunks is applied after the chunk
  OptionalTensor position;
  if (is_single_token) {
    const auto tokens_in_chunk = is_defined(call.state_position)
                                     ? call.state_position->clamp(0, *call.chunk - 1) + 1
                                     : at::ones({B}, q_input.options().dtype(at::kLong));
    has_chunk_end = (tokens_in_chunk == *call.chunk).unsqueeze(1);
    position = tokens_in_chunk.remainder(*call.chunk);
  } else if (call.between_chunks) {
    has_chunk_end = chunks.has_chunk_end();
    position = chunks.next_position();
  }
  if (count == 0)
    return {at::zeros({B, T, HO, V}, q_input.options()), S0.clone(), position, states, prepared, transitions};

  auto q = chunks.split(q_input, sum_dtype), k = chunks.split(k_input, sum_dtype, n);
  if (call.l2norm_qk) {
    q = l2_normalize(q);
    k = l2_normalize(k);
  }
  q = q.view({B, count, H, HO / H, C, D}) * call.query_scale();
  auto beta = chunks.split(call.beta, sum_dtype, n);
  if (beta.dim() == 4) beta = beta.unsqueeze(-1);
  const auto b = beta * k, w = beta * chunks.split(call.v, sum_dtype, n);

  // decay        e^{L_r - L_r'} for r' <= r, else 0
  // b_in, q_in   b and q with the factor e^{L_r}, from the start of the chunk
  // k_out        k with the factor e^{L_R - L_r}, to the end of the chunk
  // chunk_decay  e^{L_R}
  Tensor decay = at::ones({R, R}, q.options()).tril(), b_in = b, q_in = q, k_out = k;
  std::vector<Tensor> chunk_decay;
  if (is_defined(call.g)) {
    const auto g = expand_gates(chunks.split(*call.g, sum_dtype), n);
    const auto decay_in = g.cumsum(-1).exp().unsqueeze(-1);  // e^{L_r}
    decay = decay_matrix(g);
    b_in = b * decay_in;
    q_in = q * select_read_rows(decay_in, n).unsqueeze(3);
    k_out = k * exclusive_suffix_sum(g, -1).exp().unsqueeze(-1);
    chunk_decay = unbind_chunks(decay_in.narrow(-2, R - 1, 1));
  }

  // A = I + tril((b k^T) * decay, -1)
  // [w_solved, b_solved] = A^-1 [w, b_in]; the solver reads the part below the diagonal only
  const auto k_t = k.transpose(-1, -2);
  const auto solved = at::linalg_solve_triangular(b.matmul(k_t) * decay, at::cat({w, b_in}, -1),
                                                  /*upper=*/false, /*left=*/true,
                                                  /*unitriangular=*/true);
  const auto w_solved = unbind_chunks(solved.narrow(-1, 0, V)),
             b_solved = unbind_chunks(solved.narrow(-1, V, D));

  // u = A^-1 (w - b_in S)
  // S <- e^{L_R} S + k_out^T u
  // S <- between_chunks(S)                             where has_chunk_end
  const auto k_out_t = unbind_chunks(k_out.transpose(-1, -2));
  const auto applies_between =
      call.between_chunks ? has_chunk_end.view({B, count, 1, 1, 1}).unbind(1) : std::vector<Tensor>();
  std::vector<Tensor> u;
  const auto scan = chunks.scan({S0}, [&](int64_t c, const Chunks::States& state) -> Chunks::States {
    const auto S = state[0].flatten(0, 1);
    u.push_back(at::baddbmm(w_solved[c], b_solved[c], S, 1, -1));
    const auto next =
        at::baddbmm(chunk_decay.empty() ? S : chunk_decay[c] * S, k_out_t[c], u[c]).view({B, H, D, V});
    if (!call.between_chunks) return {next};
    return {
        at::where(applies_between[c], *call.between_chunks == "gelu" ? at::gelu(next) : next.tanh(), next)};
  });

  // o = q_in S + ((q k^T) * decay) u, with the rows of decay at which tokens read
  const auto scores = q.flatten(3, 4).matmul(k_t).view({B, count, H, HO / H, C, R}) *
                      select_read_rows(decay, n).unsqueeze(-3);
  const auto o = q_in.flatten(3, 4).matmul(chunks.starts(scan, 0)) +
                 scores.flatten(3, 4).matmul(at::stack(u, 0).view({count, B, H, R, V}).transpose(0, 1));
  return {chunks.join(o.view({B, count, HO, C, V}), q_input.scalar_type()),
          scan.finals[0],
          position,
          states,
          prepared,
          transitions};
}

GIRIH_IMPL_ATEN(m) { register_forward<&WithoutTF32<&forward>::call>(m); }

}  // namespace girih::delta_product
