// CUDA implementation of lattice, and of its step. Tensor cores: 16-bit elements and unit columns. fp32
// kernels: the other calls. float64 and wide memories: the ATen form.
#include "../arguments/kernel_arguments.h"
#include "../registration/dispatch.h"
#include "aten.h"
#include "exact.h"
#include "lattice/lattice.h"
#include "problem.h"

namespace girih::lattice {
namespace {

static_assert(kWidest == kernels::kLatticeWidest && kKeptChunk == kernels::kLatticeSegment);

// The tensors of one call as the kernels read them: rows aligned to 16 bytes, states zero-padded to the same
// widths.
struct Arguments {
  Tensor q, k, v, gamma, g, cu_seqlens, position, first, step, decay;
  kernels::LatticeShape shape;
  int64_t D, M;  // widths without padding

  Arguments(const Tensor& q_, const Tensor& k_, const Tensor& v_, const Tensor& gamma_,
            const OptionalTensor& g_, const OptionalTensor& state_first, const OptionalTensor& state_step,
            const OptionalTensor& state_decay, const OptionalTensor& position_, const OptionalTensor& cu,
            int64_t chunk, std::string_view objective)
      : q(in_packs(q_)),
        k(in_packs(k_)),
        v(in_packs(v_)),
        gamma(gamma_),
        g(g_.value_or(Tensor())),
        D(v_.size(3)),
        M(k_.size(3)) {
    if (given(cu)) cu_seqlens = cu->contiguous();
    shape.heads = static_cast<int>(k.size(2)), shape.query_heads = static_cast<int>(q.size(2));
    shape.D = static_cast<int>(v.size(3)), shape.M = static_cast<int>(k.size(3));
    shape.dtype = kernel_dtype(q);
    shape.objective = objective_of(objective);
    first = padded_state(state_first, false, shape.D, shape.M);
    if (given(position_)) {
      position = position_->contiguous();
      step = padded_state(state_step, false, shape.D, shape.M);
      if (given(g_)) decay = *state_decay;
    }
    shape.grid = {kernel_tokens(q, cu_seqlens), static_cast<int>(chunk),
                  position.defined() ? position.const_data_ptr<int64_t>() : nullptr};
  }

  kernels::LatticeStart start() const { return {input<4>(first), input<4>(step), input<2>(decay)}; }
  int64_t sequences() const { return shape.grid.tokens.sequences; }
  Tensor rows(int64_t heads, int64_t width, at::ScalarType type) const {
    return rows_for(q, q.size(1), cu_seqlens, heads, width, type);
  }
  Tensor numbers() const { return rows(shape.heads, 1, at::kFloat).squeeze(3); }
  Tensor states() const {
    return at::empty({sequences(), shape.heads, shape.D, shape.M}, q.options().dtype(at::kFloat));
  }
  Tensor of_sequences() const { return at::empty({sequences(), shape.heads}, q.options().dtype(at::kFloat)); }
  Tensor memories() const {
    return at::empty({kernels::chunk_count(shape.grid), shape.heads, shape.M, shape.D}, q.options());
  }

  template <class Problem>
  void fill(Problem& p) const {
    p.shape = shape;
    p.k = input<4>(k), p.v = input<4>(v), p.gamma = input<3>(gamma), p.g = input<3>(g);
  }
};

// The path of the problem, restricted by the shared memory of the device and by the number of sequences. The
// saved tensors are sized by the problem alone, so a device with too little shared memory takes the ATen
// form.
Path path_of(const Problem& problem, const Tensor& q, const Tensor& k, const Tensor& v,
             const OptionalTensor& position, int64_t chunk, bool normalize, double shrinkage) {
  const auto path = problem.path(q, chunk, normalize, shrinkage);
  if (problem.N == 0) return aten(kNoSequence);
  if (path == Path::Code::aten) return path;
  bool fits = false;
  if (path == Path::Code::exact) {
    const auto shape = exact_shape(q, k, v, chunk);
    check_launch("lattice_exact_fits", kernels::lattice_exact_fits(shape, fits));
    return fits ? path : aten(kSmallCard);
  }
  kernels::LatticeShape shape{};
  shape.D = static_cast<int>(v.size(3)), shape.M = static_cast<int>(q.size(3));
  // lattice_fits tests whether position is null and does not read it.
  shape.grid.size = static_cast<int>(chunk);
  shape.grid.position = given(position) ? position->const_data_ptr<int64_t>() : nullptr;
  check_launch("lattice_fits", kernels::lattice_fits(shape, fits));
  return fits ? path : aten(kSmallCard);
}

Results forward_cuda(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& gamma,
                     const OptionalTensor& g, const OptionalTensor& state_first,
                     const OptionalTensor& state_step, const OptionalTensor& state_decay,
                     const OptionalTensor& state_position, const OptionalTensor& cu_seqlens, int64_t chunk,
                     std::string_view objective, bool normalize, double shrinkage, bool save) {
  const auto problem = Problem::check(q, k, v, gamma, g, state_first, state_step, state_decay, state_position,
                                      cu_seqlens, chunk, objective, normalize, shrinkage);
  const c10::cuda::CUDAGuard device(q.device());
  const auto path = path_of(problem, q, k, v, state_position, chunk, normalize, shrinkage);
  if (path == Path::Code::exact) {
    const ExactCall call(q, k, v, gamma, g, state_first, state_step, state_decay, state_position, cu_seqlens,
                         chunk, objective, normalize, shrinkage);
    return call.forward(problem.saved(q, state_position, cu_seqlens, chunk, normalize, shrinkage, save),
                        save);
  }
  if (path == Path::Code::aten) {
    at::NoTF32Guard exact;
    return forward(q, k, v, gamma, g, state_first, state_step, state_decay, state_position, cu_seqlens, chunk,
                   objective, normalize, shrinkage, save);
  }
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const Arguments args(q, k, v, gamma, g, state_first, state_step, state_decay, state_position, cu_seqlens,
                       chunk, objective);
  const auto last = args.states(), last_step = args.states();
  const auto no_number = [&] { return at::empty({0}, last.options()); };
  bool is_short = false;
  check_launch("lattice_is_short", kernels::lattice_is_short(args.shape, is_short));
  const bool keeps = save || !is_short;
  const auto memories = keeps ? args.memories() : at::empty({0}, q.options());
  const auto ends =
      keeps ? at::empty({memories.size(0), args.shape.heads, 2, args.shape.M}, last.options()) : no_number();
  const auto decay = args.g.defined() ? args.of_sequences() : Tensor();
  const auto position = at::empty({args.sequences()}, q.options().dtype(at::kLong));
  const auto o = args.rows(args.shape.query_heads, args.shape.D, q.scalar_type());
  kernels::LatticeScan scan;
  args.fill(scan);
  scan.start = args.start();
  scan.end = {output<4>(last), output<4>(last_step), output<2>(decay)};
  scan.last_position = position.mutable_data_ptr<int64_t>();
  scan.memories = keeps ? memories.mutable_data_ptr() : nullptr;
  scan.ends = keeps ? ends.mutable_data_ptr<float>() : nullptr;
  kernels::LatticeRead read;
  args.fill(read);
  read.q = input<4>(args.q);
  read.start = args.start();
  read.memories = scan.memories;
  read.o = output<4>(o);
  check_launch("lattice_forward", kernels::lattice_forward(scan, read, stream));

  // The returned states may be overwritten by a step, so saved states are copied.
  const auto own = [&](const Tensor& state) {
    return save ? cut(state, args.D, args.M).clone() : cut(state, args.D, args.M);
  };
  return {without_packs(o, args.D),
          own(last),
          own(last_step),
          args.g.defined() ? OptionalTensor(decay) : std::nullopt,
          position,
          save ? memories : at::empty({0}, q.options()),
          save ? ends : no_number(),
          save ? last : no_number(),
          save ? last_step : no_number()};
}

Gradients backward_cuda(const OptionalTensor& grad_o, const OptionalTensor& grad_first,
                        const OptionalTensor& grad_step, const OptionalTensor& grad_decay,
                        const OptionalTensor& grad_position, const Tensor& q, const Tensor& k,
                        const Tensor& v, const Tensor& gamma, const OptionalTensor& g,
                        const OptionalTensor& state_first, const OptionalTensor& state_step,
                        const OptionalTensor& state_decay, const OptionalTensor& state_position,
                        const OptionalTensor& cu_seqlens, const Tensor& memories, const Tensor& ends,
                        const Tensor& last, const Tensor& last_step, int64_t chunk,
                        std::string_view objective, bool normalize, double shrinkage) {
  const auto problem = Problem::check(q, k, v, gamma, g, state_first, state_step, state_decay, state_position,
                                      cu_seqlens, chunk, objective, normalize, shrinkage);
  const c10::cuda::CUDAGuard device(q.device());
  const auto path = path_of(problem, q, k, v, state_position, chunk, normalize, shrinkage);
  if (path == Path::Code::aten) {
    return run_without_kernel<&backward_cuda>("lattice_backward", grad_o, grad_first, grad_step, grad_decay,
                                              grad_position, q, k, v, gamma, g, state_first, state_step,
                                              state_decay, state_position, cu_seqlens, memories, ends, last,
                                              last_step, chunk, objective, normalize, shrinkage);
  }
  const auto kept = problem.saved(q, state_position, cu_seqlens, chunk, normalize, shrinkage, true);
  check_kept("lattice", "memories", memories, kept.memories, kept.memories_type);
  check_kept("lattice", "ends", ends, kept.ends, at::kFloat);
  check_kept("lattice", "last", last, kept.last, at::kFloat);
  check_kept("lattice", "last_step", last_step, kept.last, at::kFloat);
  if (path == Path::Code::exact) {
    const ExactCall call(q, k, v, gamma, g, state_first, state_step, state_decay, state_position, cu_seqlens,
                         chunk, objective, normalize, shrinkage);
    return call.backward(grad_o, grad_first, grad_step, grad_decay, memories);
  }
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const Arguments args(q, k, v, gamma, g, state_first, state_step, state_decay, state_position, cu_seqlens,
                       chunk, objective);
  const auto& shape = args.shape;
  const bool gated = args.g.defined(), positions = args.position.defined();
  const auto type = q.scalar_type();
  const auto dout =
      given(grad_o) ? in_packs(grad_o->to(type)) : args.rows(shape.query_heads, shape.D, type).zero_();

  const auto dq = args.rows(shape.query_heads, shape.M, type), dk = args.rows(shape.heads, shape.M, type),
             dv = args.rows(shape.heads, shape.D, type), dgamma = args.numbers();
  const auto at_floor = gated ? args.numbers() : Tensor(), gradients = args.memories();
  const auto dstep = positions ? args.states() : Tensor(),
             ddecay = positions && gated ? args.of_sequences() : Tensor();
  kernels::LatticeReads reads;
  args.fill(reads);
  reads.q = input<4>(args.q), reads.dout = input<4>(dout);
  reads.start = args.start();
  reads.memories = memories.const_data_ptr();
  reads.dq = output<4>(dq), reads.dk = output<4>(dk), reads.dv = output<4>(dv);
  reads.dgamma = output<3>(dgamma), reads.at_floor = output<3>(at_floor);
  reads.gradients = gradients.mutable_data_ptr();
  reads.dstep = output<4>(dstep), reads.ddecay = output<2>(ddecay);
  check_launch("lattice_reads", kernels::lattice_reads(reads, stream));

  const auto dfirst = args.states(), dopen = gated ? args.of_sequences() : Tensor();
  const auto dlast = padded_state(grad_first, false, shape.D, shape.M),
             dlast_step = padded_state(grad_step, false, shape.D, shape.M);
  // With gates lattice_reverse overwrites ends; backward may run again with the saved tensor.
  const auto at_ends = gated ? ends.clone() : ends;
  kernels::LatticeReverse reverse;
  args.fill(reverse);
  reverse.start = args.start();
  reverse.memories = memories.const_data_ptr(), reverse.ends = at_ends.mutable_data_ptr<float>();
  reverse.last = input<4>(last), reverse.last_step = input<4>(last_step);
  reverse.dlast = input<4>(dlast), reverse.dlast_step = input<4>(dlast_step);
  reverse.dlast_decay = input<2>(grad_decay);
  reverse.gradients = gradients.mutable_data_ptr();
  reverse.dmemory = output<4>(dfirst), reverse.dstep = output<4>(dstep);
  reverse.ddecay = output<2>(ddecay), reverse.dopen = output<2>(dopen);
  const auto dg = gated ? args.numbers() : Tensor();
  kernels::LatticeColumns columns;
  args.fill(columns);
  columns.memories = memories.const_data_ptr(), columns.gradients = gradients.const_data_ptr();
  columns.ends = gated ? at_ends.const_data_ptr<float>() : nullptr;
  columns.at_floor = input<3>(at_floor), columns.dopen = input<2>(dopen);
  columns.dk = output<4>(dk), columns.dv = output<4>(dv);
  columns.dgamma = output<3>(dgamma), columns.dg = output<3>(dg);
  check_launch("lattice_reverse", kernels::lattice_reverse(reverse, columns, stream));

  return {without_packs(dq, args.M),
          without_packs(dk, args.M),
          without_packs(dv, args.D),
          dgamma.to(gamma.scalar_type()),
          if_given(g, [&] { return dg.to(g->scalar_type()); }),
          cut(dfirst, args.D, args.M),
          positions ? OptionalTensor(cut(dstep, args.D, args.M)) : no_gradient(state_step),
          positions && gated ? OptionalTensor(ddecay) : no_gradient(state_decay),
          std::nullopt,
          std::nullopt};
}

Tensor step_cuda(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& gamma,
                 const OptionalTensor& g, const Tensor& state_first, const Tensor& state_step,
                 const OptionalTensor& state_decay, const Tensor& state_position, int64_t chunk,
                 std::string_view objective, bool normalize, double shrinkage) {
  check_step(describe("lattice"), q, {state_first, state_step, state_decay, state_position});
  Problem::check(q, k, v, gamma, g, state_first, state_step, state_decay, state_position, std::nullopt, chunk,
                 objective, normalize, shrinkage);
  if (Problem::step_path(q, normalize, shrinkage) == Path::Code::aten) {
    return run_without_kernel<&step_cuda>("lattice_step", q, k, v, gamma, g, state_first, state_step,
                                          state_decay, state_position, chunk, objective, normalize,
                                          shrinkage);
  }
  const c10::cuda::CUDAGuard device(q.device());
  const auto token = [](const Tensor& x) { return x.select(1, 0); };
  const auto o = at::empty({q.size(0), 1, q.size(2), v.size(3)}, q.options());
  const auto position = state_position.contiguous(), next = at::empty_like(position);
  kernels::LatticeStep p;
  p.sequences = q.size(0);
  p.heads = static_cast<int>(k.size(2)), p.query_heads = static_cast<int>(q.size(2));
  p.D = static_cast<int>(v.size(3)), p.M = static_cast<int>(k.size(3)), p.chunk = static_cast<int>(chunk);
  p.objective = objective_of(objective);
  p.q = input<3>(token(q)), p.k = input<3>(token(k)), p.v = input<3>(token(v));
  p.gamma = input<2>(token(gamma));
  if (given(g)) p.g = input<2>(token(*g));
  p.memory = output<4>(state_first);
  p.position = nullptr, p.next_position = nullptr;
  if (chunk > 1) {
    p.step = output<4>(state_step);
    if (given(g)) p.decay = output<2>(*state_decay);
    p.position = position.const_data_ptr<int64_t>(), p.next_position = next.mutable_data_ptr<int64_t>();
  }
  p.o = output<3>(token(o));
  check_launch("lattice_step", kernels::lattice_step(p, c10::cuda::getCurrentCUDAStream()));
  if (chunk > 1) state_position.copy_(next);
  return o;
}

Explanation explain(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& gamma,
                    const OptionalTensor& g, const OptionalTensor& state_first,
                    const OptionalTensor& state_step, const OptionalTensor& state_decay,
                    const OptionalTensor& state_position, const OptionalTensor& cu_seqlens, int64_t chunk,
                    std::string_view objective, bool normalize, double shrinkage, std::string_view device,
                    bool step) {
  const auto p = Problem::check(q, k, v, gamma, g, state_first, state_step, state_decay, state_position,
                                cu_seqlens, chunk, objective, normalize, shrinkage);
  const c10::cuda::CUDAGuard guard(q.device());
  return explained(step ? Problem::step_path(q, normalize, shrinkage)
                        : path_of(p, q, k, v, state_position, chunk, normalize, shrinkage),
                   device);
}

}  // namespace

TORCH_LIBRARY_IMPL(girih, CUDA, m) {
  m.impl("lattice_explain", &explain);
  m.impl("lattice_forward", &forward_cuda);
  m.impl("lattice_backward", &backward_cuda);
  m.impl("lattice_step", &step_cuda);
}

}  // namespace girih::lattice
