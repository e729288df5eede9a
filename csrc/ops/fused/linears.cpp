// Several linear layers of one input: y_i = x W_i^T.
#include <torch/library.h>

#include <algorithm>

#include "call.h"

namespace girih::fused {
namespace {

constexpr int64_t kNarrow = 64;  // products of up to so many features are bound by launches

using Group = std::vector<size_t>;  // indices of weights

// Groups of weights that form one product: all narrow weights, which are bound by launches, and each other
// weight alone.
std::vector<Group> grouped(at::TensorList weights) {
  std::vector<Group> groups;
  Group narrow;
  for (size_t i = 0; i < weights.size(); ++i) {
    if (weights[i].size(0) <= kNarrow) {
      narrow.push_back(i);
    } else {
      groups.push_back({i});
    }
  }
  if (!narrow.empty()) groups.push_back(std::move(narrow));
  return groups;
}

std::vector<int64_t> features(at::TensorList weights, const Group& group) {
  std::vector<int64_t> sizes;
  for (const size_t i : group) sizes.push_back(weights[i].size(0));
  return sizes;
}

// Calls f(i, part of weight i) for the product of a group or for its weight gradient.
template <class F>
void for_parts(const Tensor& of_group, const Group& group, at::TensorList weights, int64_t dim, const F& f) {
  if (group.size() == 1) return f(group[0], of_group);
  const auto parts = of_group.split_with_sizes(features(weights, group), dim);
  for (size_t n = 0; n < group.size(); ++n) f(group[n], parts[n]);
}

Tensor below(at::TensorList weights, const Group& group) {
  if (group.size() == 1) return weights[group[0]];
  Tensors of_group;
  for (const size_t i : group) of_group.push_back(weights[i]);
  return at::cat(of_group);
}

// The weights of each group in `dtype`, concatenated by rows. A single weight that already has this dtype is
// not copied.
Tensors copies(at::TensorList weights, const std::vector<Group>& groups, at::ScalarType dtype) {
  Tensors made;
  if (std::ranges::all_of(weights, [&](const Tensor& w) { return w.scalar_type() == dtype; })) {
    for (const auto& group : groups) made.push_back(below(weights, group));
    return made;
  }
  Tensors ordered;
  std::vector<int64_t> sizes, of_groups;
  int64_t all = 0;
  for (const auto& group : groups) {
    const auto before = all;
    for (const size_t i : group) {
      ordered.push_back(weights[i]);
      sizes.push_back(weights[i].size(0));
      all += sizes.back();
    }
    of_groups.push_back(all - before);
  }
  const auto copy = at::empty({all, weights[0].size(1)}, weights[0].options().dtype(dtype));
  at::_foreach_copy_(copy.split_with_sizes(sizes), ordered);
  return copy.split_with_sizes(of_groups);
}

// Concatenates the gradients of a group to [..., sum of features]; zeros for undefined ones; undefined if all
// are.
Tensor beside(const variable_list& dys, const Group& group, at::TensorList weights) {
  if (group.size() == 1) return dys[group[0]];
  const auto given = std::ranges::find_if(group, [&](size_t i) { return dys[i].defined(); });
  if (given == group.end()) return {};
  Tensors parts;
  for (const size_t i : group) {
    parts.push_back(dys[i].defined()
                        ? dys[i]
                        : dys[*given].new_zeros_symint(sizes_of_width(dys[*given], weights[i].size(0))));
  }
  return at::cat(parts, -1);
}

// Keys under which a node saves each weight (for second derivatives) and the version of the weight.
std::string weight_at(size_t i) { return "weight " + std::to_string(i); }
std::string version_at(size_t i) { return "version " + std::to_string(i); }
int64_t version_of(const Tensor& x) { return x.is_inference() ? -1 : int64_t(x._version()); }

struct Linears : Function<Linears> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, at::TensorList weights) {
    const auto groups = grouped(weights);
    auto kept = copies(weights, groups, x.scalar_type());
    const auto rows = in_rows(x);
    variable_list made(weights.size());
    for (size_t n = 0; n < groups.size(); ++n) {  // the dtypes are those of autocast already
      const auto y = at::_unsafe_view_symint(rows.mm(kept[n].t()), sizes_of_width(x, kept[n].size(0)));
      for_parts(y, groups[n], weights, -1, [&](size_t i, const Tensor& part) { made[i] = part; });
    }
    const bool of_weights = std::ranges::any_of(weights, [](const Tensor& w) { return w.requires_grad(); });
    if (!x.requires_grad()) kept.assign(kept.size(), {});
    kept.push_back(of_weights ? x : Tensor());
    ctx->save_for_backward(std::move(kept));
    for (size_t i = 0; i < weights.size(); ++i) {  // one entry each: compiled autograd supports no lists
      ctx->saved_data[weight_at(i)] = weights[i];
      ctx->saved_data[version_at(i)] = version_of(weights[i]);
    }
    ctx->set_materialize_grads(false);
    return made;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& dys) {
    const auto kept = ctx->get_saved_variables();
    Tensors weights;
    bool written = false;
    for (size_t i = 0; i < dys.size(); ++i) {
      weights.push_back(ctx->saved_data[weight_at(i)].toTensor());
      written |= ctx->saved_data[version_at(i)].toInt() != version_of(weights[i]);
    }
    const auto groups = grouped(weights);
    const bool of_x = ctx->needs_input_grad(0);
    // torch.compile fuses sums into their readers, and clones the target of in-place operators.
    const bool is_traced = c10::impl::TorchDispatchModeTLS::any_modes_set();
    TORCH_CHECK(!of_x || !once_more() || !written,
                "girih: linears: a weight has been modified by an inplace operation since the forward");
    Tensor dx, like;  // like: has the sizes of dx except for the last
    variable_list results(1 + weights.size());
    for (size_t n = 0; n < groups.size(); ++n) {
      const auto& group = groups[n];
      auto dy = beside(dys, group, weights);
      if (!dy.defined()) continue;
      like = dy;
      dy = in_rows(dy);
      if (of_x && once_more()) {
        const auto w = below(weights, group).to(dy.scalar_type());
        dx = dx.defined() ? at::addmm(dx, dy, w) : dy.mm(w);
      } else if (of_x && dx.defined() && is_traced) {
        dx = dx + dy.mm(kept[n]);
      } else if (of_x && dx.defined()) {
        // Backward under autocast: dx has the dtype of autocast, and in-place operators are not cast.
        dx.addmm_(dy.to(dx.scalar_type()), kept[n].to(dx.scalar_type()));
      } else if (of_x) {
        dx = dy.mm(kept[n]);
      }
      const auto wanted = [&](size_t i) { return ctx->needs_input_grad(1 + i); };
      if (!std::ranges::any_of(group, wanted)) continue;
      for_parts(matrix_product(dy.t(), in_rows(kept.back()), weights[group[0]].scalar_type()), group, weights,
                0, [&](size_t i, const Tensor& part) {
                  if (wanted(i) && dys[i].defined()) results[1 + i] = part;
                });
    }
    if (dx.defined()) results[0] = dx.view_symint(sizes_of_width(like, weights[0].size(1)));
    return results;
  }
};

}  // namespace

Tensors linears(const Tensor& x, at::TensorList weights) {
  TORCH_CHECK(x.dim() > 0, "girih: linears: x has no dimensions; expected [..., in]");
  return Linears::apply(x, weights);
}

TORCH_LIBRARY_FRAGMENT(girih, m) { m.def("linears(Tensor x, Tensor[] weights) -> Tensor[]", &linears); }

}  // namespace girih::fused
