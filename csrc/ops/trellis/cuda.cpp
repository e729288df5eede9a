// trellis by its kernels, of 16-bit elements on the tensor cores, exactly of the rest but fp64 and memories
// wider than 256, and its step. The ATen form serves these.
#include "../arguments/kernel_arguments.h"
#include "../arguments/shared_heads.h"
#include "../registration/dispatch.h"
#include "aten.h"
#include "exact.h"
#include "problem.h"
#include "trellis/trellis.h"

namespace girih::trellis {
namespace {

static_assert(kWidest == kernels::kTrellisWidest && kExactWidest == kernels::kTrellisExactWidest &&
              kKeptChunk == kernels::kChunk);

// The problem's path, as far as this card and these sequences go.
Path path_of(const Problem& problem, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& a) {
  const auto path = problem.path(q);
  if (problem.N == 0) return aten(kNoSequence);
  if (path == Path::Code::aten) return path;
  bool fits = false;
  if (path == Path::Code::exact) {
    check_launch("trellis_exact_fits", kernels::trellis_exact_fits(exact_shape(q, k, v, a), fits));
  } else {
    check_launch("trellis_fits", kernels::trellis_fits(fits));
  }
  return fits ? path : aten(kSmallCard);
}

// One call's tensors as the kernels read them: rows in packs of 16 bytes, and a memory for every head of
// queries.
struct Arguments {
  Tensor q, x[2], a, gamma, g, cu_seqlens, position, first[2], initial[2];
  kernels::TrellisShape shape;
  int64_t H, M, width[2];  // of memories as given, without padding

  Arguments(const Tensor& q_, const Tensor& k, const Tensor& v, const Tensor& a_, const Tensor& gamma_,
            const OptionalTensor& g_, const OptionalTensor& first_k, const OptionalTensor& state_k,
            const OptionalTensor& first_v, const OptionalTensor& state_v, const OptionalTensor& position_,
            const OptionalTensor& cu, int64_t chunk, std::string_view phi, std::string_view f)
      : q(in_packs(q_)), H(k.size(2)), M(a_.size(3)), width{k.size(3), v.size(3)} {
    const auto HQ = q.size(2);
    const auto rows = [&](const Tensor& x) { return in_packs(for_each_head(x, HQ)); };
    x[0] = rows(k), x[1] = rows(v), a = rows(a_), gamma = for_each_head(gamma_, HQ);
    if (given(g_)) g = for_each_head(*g_, HQ);
    if (given(cu)) cu_seqlens = cu->contiguous();
    if (const auto within = within_chunk(position_, chunk); given(within)) position = within->contiguous();
    const auto state = [&](const OptionalTensor& s, int memory) {
      const auto all = H == HQ ? *s : s->repeat_interleave(HQ / H, 1);
      return padded_state(all, false, M, x[memory].size(3));
    };
    initial[0] = state(state_k, 0), initial[1] = state(state_v, 1);
    if (position.defined()) first[0] = state(first_k, 0), first[1] = state(first_v, 1);
    shape.grid = {kernel_tokens(q, cu_seqlens), static_cast<int>(chunk),
                  position.defined() ? position.const_data_ptr<int64_t>() : nullptr};
    shape.heads = static_cast<int>(HQ);
    shape.D = static_cast<int>(q.size(3)), shape.V = static_cast<int>(x[1].size(3));
    shape.M = static_cast<int>(a.size(3)), shape.slots = static_cast<int>(M);
    shape.dtype = kernel_dtype(q);
    shape.phi = map_of(phi), shape.f = map_of(f);
  }

  // [B, T, heads, width] that kernels write, for the caller or for one another.
  Tensor rows(int64_t width) const {
    return rows_for(q, q.size(1), cu_seqlens, shape.heads, width, q.scalar_type());
  }
  Tensor scratch(int64_t width) const {
    return at::empty({q.size(0), q.size(1), shape.heads, width}, q.options());
  }
  // Of both memories, [2, B, T, heads, width].
  Tensor of_tokens(int64_t width, at::ScalarType type) const {
    return at::empty({2, q.size(0), q.size(1), shape.heads, width}, q.options().dtype(type));
  }
  Tensor numbers() const { return rows_for(q, q.size(1), cu_seqlens, shape.heads, 1, at::kFloat).squeeze(3); }
  // Every chunk's, of a head each.
  Tensor memories() const {
    const int64_t tile = kernels::trellis_tile(shape);
    return at::empty({kernels::chunk_count(shape.grid), shape.heads, tile, tile}, q.options());
  }
  // Numbers of tokens, in so many parts.
  Tensor parts(int64_t count) const {
    return at::empty({count, q.size(0), q.size(1), shape.heads}, q.options().dtype(at::kFloat));
  }
  // What the gates of chunks come to for their tokens.
  Tensor token_gates(cudaStream_t stream) const {
    const auto tokens =
        at::empty({q.size(0), q.size(1), shape.heads, sizeof(kernels::TokenGate) / sizeof(float)},
                  q.options().dtype(at::kFloat));
    const kernels::TrellisGates p{shape, input<3>(gamma), input<3>(g),
                                  static_cast<kernels::TokenGate*>(tokens.mutable_data_ptr())};
    check_launch("trellis_gates", kernels::trellis_gates(p, stream));
    return tokens;
  }
  // [N, heads, M, X], padded.
  Tensor states(int memory) const {
    return at::empty({shape.grid.tokens.sequences, shape.heads, M, shape.width(memory)},
                     q.options().dtype(at::kFloat));
  }
  // A state that a query head each has, as the caller has them: all of a memory are alike.
  Tensor one_of(const Tensor& state, int memory) const {
    const auto group = shape.heads / H;
    const auto own = group == 1 ? state : state.unflatten(1, {H, group}).select(2, 0);
    return own.narrow(-1, 0, width[memory]).contiguous();
  }
  // A gradient of one: their sum.
  Tensor sum_of(const Tensor& state, int memory) const {
    const auto group = shape.heads / H;
    const auto all = group == 1 ? state : state.unflatten(1, {H, group}).sum(2);
    return all.narrow(-1, 0, width[memory]).contiguous();
  }
  Tensor gathered(const Tensor& parts, const Tensor& like) const {
    if (parts.dim() == 3) return summed_heads(parts, like).to(like.scalar_type());
    return girih::gathered(parts, H, like.size(3), like);
  }

  template <class Problem>
  void fill(Problem& p, const Tensor& token_gates) const {
    p.shape = shape;
    p.gates = static_cast<const kernels::TokenGate*>(token_gates.const_data_ptr());
    if constexpr (requires { p.a; }) p.a = input<4>(a);
    if constexpr (requires { p.q; }) p.q = input<4>(q);
    for (int m = 0; m < 2; ++m) p.x[m] = input<4>(x[m]);
  }
};

Results forward_cuda(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& a, const Tensor& gamma,
                     const OptionalTensor& g, const OptionalTensor& state_first_k,
                     const OptionalTensor& state_k, const OptionalTensor& state_first_v,
                     const OptionalTensor& state_v, const OptionalTensor& state_position,
                     const OptionalTensor& cu_seqlens, int64_t chunk, std::string_view phi,
                     std::string_view f, bool save) {
  const auto problem = Problem::check(q, k, v, a, gamma, g, state_first_k, state_k, state_first_v, state_v,
                                      state_position, cu_seqlens, chunk, phi, f);
  const c10::cuda::CUDAGuard device(q.device());
  const auto path = path_of(problem, q, k, v, a);
  if (path == Path::Code::exact) {
    const ExactCall call(q, k, v, a, gamma, g, state_first_k, state_k, state_first_v, state_v, state_position,
                         cu_seqlens, chunk, phi, f);
    return call.forward(save);
  }
  if (path == Path::Code::aten) {
    at::NoTF32Guard exact;
    return forward(q, k, v, a, gamma, g, state_first_k, state_k, state_first_v, state_v, state_position,
                   cu_seqlens, chunk, phi, f, save);
  }
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const Arguments args(q, k, v, a, gamma, g, state_first_k, state_k, state_first_v, state_v, state_position,
                       cu_seqlens, chunk, phi, f);
  bool reads = false;
  check_launch("trellis_scan_reads", kernels::trellis_scan_reads(args.shape, reads));
  const auto nothing = [&] { return at::empty({0}, q.options()); };
  const auto o = args.rows(args.shape.V), gates = args.token_gates(stream);
  const Tensor last_first[] = {args.states(0), args.states(1)}, last[] = {args.states(0), args.states(1)};
  const auto position = at::empty({args.shape.grid.tokens.sequences}, q.options().dtype(at::kLong));
  const bool keeps = save || !reads;
  const Tensor memories[] = {keeps ? args.memories() : nothing(), keeps ? args.memories() : nothing()};
  const auto u = keeps ? args.of_tokens(args.shape.M, q.scalar_type()) : nothing();
  const auto z = save ? args.of_tokens(args.shape.M, q.scalar_type()) : nothing();
  const auto fit = save ? args.of_tokens(4, at::kFloat) : at::empty({0}, args.initial[0].options());
  kernels::TrellisScan scan;
  args.fill(scan, gates);
  scan.last_position = position.mutable_data_ptr<int64_t>();
  if (reads) scan.o = output<4>(o);
  for (int m = 0; m < 2; ++m) {
    scan.first[m] = input<4>(args.first[m]), scan.initial[m] = input<4>(args.initial[m]);
    scan.last_first[m] = output<4>(last_first[m]), scan.last[m] = output<4>(last[m]);
    if (keeps) scan.u[m] = output<4>(u[m]);
    if (save) scan.z[m] = output<4>(z[m]), scan.fit[m] = output<4>(fit[m]);
    scan.memories[m] = keeps ? memories[m].mutable_data_ptr() : nullptr;
  }
  check_launch("trellis_scan", kernels::trellis_scan(scan, stream));
  if (!reads) {
    kernels::TrellisOutput output_;
    args.fill(output_, gates);
    for (int m = 0; m < 2; ++m) {
      output_.u[m] = input<4>(u[m]), output_.memories[m] = memories[m].const_data_ptr();
    }
    output_.o = output<4>(o);
    check_launch("trellis_output", kernels::trellis_output(output_, stream));
  }
  return {without_packs(o, v.size(3)),
          args.one_of(last_first[0], 0),
          args.one_of(last[0], 0),
          args.one_of(last_first[1], 1),
          args.one_of(last[1], 1),
          position,
          save ? memories[0] : nothing(),
          save ? memories[1] : nothing(),
          z,
          save ? u : nothing(),
          fit};
}

Gradients backward_cuda(const OptionalTensor& grad_o, const OptionalTensor& grad_first_k,
                        const OptionalTensor& grad_k, const OptionalTensor& grad_first_v,
                        const OptionalTensor& grad_v, const OptionalTensor& grad_position, const Tensor& q,
                        const Tensor& k, const Tensor& v, const Tensor& a, const Tensor& gamma,
                        const OptionalTensor& g, const OptionalTensor& state_first_k,
                        const OptionalTensor& state_k, const OptionalTensor& state_first_v,
                        const OptionalTensor& state_v, const OptionalTensor& state_position,
                        const OptionalTensor& cu_seqlens, const Tensor& memories_k, const Tensor& memories_v,
                        const Tensor& z, const Tensor& u, const Tensor& fit, int64_t chunk,
                        std::string_view phi, std::string_view f) {
  const auto problem = Problem::check(q, k, v, a, gamma, g, state_first_k, state_k, state_first_v, state_v,
                                      state_position, cu_seqlens, chunk, phi, f);
  const c10::cuda::CUDAGuard device(q.device());
  const auto path = path_of(problem, q, k, v, a);
  if (path == Path::Code::aten) {
    return run_without_kernel<&backward_cuda>("trellis_backward", grad_o, grad_first_k, grad_k, grad_first_v,
                                              grad_v, grad_position, q, k, v, a, gamma, g, state_first_k,
                                              state_k, state_first_v, state_v, state_position, cu_seqlens,
                                              memories_k, memories_v, z, u, fit, chunk, phi, f);
  }
  const auto kept = problem.saved(q, state_position, cu_seqlens, chunk, true);
  check_kept("trellis", "memories_k", memories_k, kept.memories[0], kept.type);
  check_kept("trellis", "memories_v", memories_v, kept.memories[1], kept.type);
  check_kept("trellis", "z", z, kept.tokens, kept.type);
  check_kept("trellis", "u", u, kept.tokens, kept.type);
  check_kept("trellis", "fit", fit, kept.fit, at::kFloat);
  if (path == Path::Code::exact) {
    const ExactCall call(q, k, v, a, gamma, g, state_first_k, state_k, state_first_v, state_v, state_position,
                         cu_seqlens, chunk, phi, f);
    return call.backward(grad_o, {grad_first_k, grad_first_v}, {grad_k, grad_v}, {memories_k, memories_v}, z,
                         u);
  }
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const Arguments args(q, k, v, a, gamma, g, state_first_k, state_k, state_first_v, state_v, state_position,
                       cu_seqlens, chunk, phi, f);
  const auto& shape = args.shape;
  const Tensor memories[] = {memories_k, memories_v};
  const auto dout = given(grad_o) ? in_packs(grad_o->to(q.scalar_type())) : args.rows(shape.V).zero_();

  const auto gates = args.token_gates(stream);
  const auto dq = args.rows(shape.D);
  const Tensor w[] = {args.q, dout}, l[] = {args.scratch(shape.M), args.scratch(shape.M)};
  kernels::TrellisRows rows;
  args.fill(rows, gates);
  rows.dout = input<4>(dout), rows.dq = output<4>(dq);
  for (int m = 0; m < 2; ++m) {
    rows.u[m] = input<4>(u[m]);
    rows.memories[m] = memories[m].const_data_ptr();
    rows.l[m] = output<4>(l[m]);
  }
  check_launch("trellis_rows", kernels::trellis_rows(rows, stream));

  const Tensor das[] = {args.rows(shape.M), args.rows(shape.M)};
  const Tensor dx[] = {args.rows(shape.D), args.rows(shape.V)};
  const Tensor dinitial[] = {args.states(0), args.states(1)};
  const auto tiles = (chunk + 15) / 16;
  const auto dgammas = args.parts(2), dL = args.g.defined() ? args.parts(2 * tiles) : Tensor();
  Tensor dfirst[2];
  const OptionalTensor grads_first[] = {grad_first_k, grad_first_v}, grads[] = {grad_k, grad_v};
  Tensor dlast_first[2], dlast[2];
  kernels::TrellisReverse reverse;
  args.fill(reverse, gates);
  reverse.dgammas = dgammas.mutable_data_ptr<float>();
  reverse.dL = dL.defined() ? dL.mutable_data_ptr<float>() : nullptr;
  for (int m = 0; m < 2; ++m) {
    if (args.position.defined()) dfirst[m] = args.states(m);
    // The caller's states are those of every group's first head.
    const auto of_heads = [&](const OptionalTensor& grad) {
      if (!given(grad)) return Tensor();
      const auto padded = padded_state(*grad, false, args.M, shape.width(m));
      const auto group = shape.heads / args.H;
      if (group == 1) return padded;
      return at::constant_pad_nd(padded.unsqueeze(2), {0, 0, 0, 0, 0, group - 1}).flatten(1, 2);
    };
    dlast_first[m] = of_heads(grads_first[m]), dlast[m] = of_heads(grads[m]);
    reverse.first[m] = input<4>(args.first[m]), reverse.memories[m] = memories[m].const_data_ptr();
    reverse.w[m] = input<4>(w[m]), reverse.l[m] = input<4>(l[m]), reverse.u[m] = input<4>(u[m]);
    reverse.z[m] = input<4>(z[m]), reverse.fit[m] = input<4>(fit[m]);
    reverse.dlast_first[m] = input<4>(dlast_first[m]), reverse.dlast[m] = input<4>(dlast[m]);
    reverse.dfirst[m] = output<4>(dfirst[m]), reverse.dinitial[m] = output<4>(dinitial[m]);
    reverse.da[m] = output<4>(das[m]), reverse.dx[m] = output<4>(dx[m]);
  }
  check_launch("trellis_reverse", kernels::trellis_reverse(reverse, stream));

  const auto dgamma = args.numbers(), dg = args.g.defined() ? args.numbers() : Tensor();
  const kernels::TrellisGateGradients numbers{shape, dgammas.const_data_ptr<float>(), reverse.dL,
                                              output<3>(dgamma), output<3>(dg)};
  check_launch("trellis_gate_gradients", kernels::trellis_gate_gradients(numbers, stream));
  const auto da = das[0].add(das[1]);

  const auto of_first = [&](const OptionalTensor& first, int m) {
    return if_given(first, [&] {
      return dfirst[m].defined() ? args.sum_of(dfirst[m], m) : at::zeros(first->sizes(), first->options());
    });
  };
  return {without_packs(dq, q.size(3)),
          args.gathered(dx[0], k),
          args.gathered(dx[1], v),
          args.gathered(da, a),
          args.gathered(dgamma, gamma),
          if_given(g, [&] { return args.gathered(dg, *g); }),
          of_first(state_first_k, 0),
          args.sum_of(dinitial[0], 0),
          of_first(state_first_v, 1),
          args.sum_of(dinitial[1], 1),
          std::nullopt,
          std::nullopt};
}

Tensor step_cuda(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& a, const Tensor& gamma,
                 const OptionalTensor& g, const Tensor& state_first_k, const Tensor& state_k,
                 const Tensor& state_first_v, const Tensor& state_v, const Tensor& state_position,
                 int64_t chunk, std::string_view phi, std::string_view f) {
  check_step(describe("trellis"), q, {state_first_k, state_k, state_first_v, state_v, state_position});
  Problem::check(q, k, v, a, gamma, g, state_first_k, state_k, state_first_v, state_v, state_position,
                 std::nullopt, chunk, phi, f);
  if (Problem::step_path(q) == Path::Code::aten) {
    return run_without_kernel<&step_cuda>("trellis_step", q, k, v, a, gamma, g, state_first_k, state_k,
                                          state_first_v, state_v, state_position, chunk, phi, f);
  }
  const c10::cuda::CUDAGuard device(q.device());
  const auto token = [](const Tensor& x) { return x.select(1, 0); };
  const auto o = at::empty({q.size(0), 1, q.size(2), v.size(3)}, q.options());
  // Positions lie side by side for the kernel.
  const auto position = state_position.contiguous();
  kernels::TrellisStep p;
  p.sequences = q.size(0);
  p.heads = static_cast<int>(k.size(2)), p.query_heads = static_cast<int>(q.size(2));
  p.D = static_cast<int>(k.size(3)), p.V = static_cast<int>(v.size(3)), p.M = static_cast<int>(a.size(3));
  p.chunk = static_cast<int>(chunk);
  p.phi = map_of(phi), p.f = map_of(f);
  p.q = input<3>(token(q)), p.k = input<3>(token(k)), p.v = input<3>(token(v)), p.a = input<3>(token(a));
  p.gamma = input<2>(token(gamma));
  if (given(g)) p.g = input<2>(token(*g));
  p.first[0] = output<4>(state_first_k), p.first[1] = output<4>(state_first_v);
  p.memory[0] = output<4>(state_k), p.memory[1] = output<4>(state_v);
  p.position = position.mutable_data_ptr<int64_t>();
  p.o = output<3>(token(o));
  check_launch("trellis_step", kernels::trellis_step(p, c10::cuda::getCurrentCUDAStream()));
  if (!position.is_same(state_position)) state_position.copy_(position);
  return o;
}

Explanation explain(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& a, const Tensor& gamma,
                    const OptionalTensor& g, const OptionalTensor& state_first_k,
                    const OptionalTensor& state_k, const OptionalTensor& state_first_v,
                    const OptionalTensor& state_v, const OptionalTensor& state_position,
                    const OptionalTensor& cu_seqlens, int64_t chunk, std::string_view phi, std::string_view f,
                    std::string_view device, bool step) {
  const auto p = Problem::check(q, k, v, a, gamma, g, state_first_k, state_k, state_first_v, state_v,
                                state_position, cu_seqlens, chunk, phi, f);
  const c10::cuda::CUDAGuard guard(q.device());
  return explained(step ? Problem::step_path(q) : path_of(p, q, k, v, a), device);
}

}  // namespace

TORCH_LIBRARY_IMPL(girih, CUDA, m) {
  m.impl("trellis_explain", &explain);
  m.impl("trellis_forward", &forward_cuda);
  m.impl("trellis_backward", &backward_cuda);
  m.impl("trellis_step", &step_cuda);
}

}  // namespace girih::trellis
