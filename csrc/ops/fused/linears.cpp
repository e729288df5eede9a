// Several linear layers of one input: y_i = x W_i^T.
#include <torch/library.h>

#include <algorithm>

#include "call.h"

namespace girih::fused {
namespace {

constexpr int64_t kNarrow = 64;  // products of up to so many features are bound by launches

using WeightGroup = std::vector<size_t>;  // indices of weights

// Groups of weights that form one product: all narrow weights, which are bound by launches, and each other
// weight alone.
std::vector<WeightGroup> group_weights(at::TensorList weights) {
  std::vector<WeightGroup> groups;
  WeightGroup narrow;
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

std::vector<int64_t> features(at::TensorList weights, const WeightGroup& group) {
  std::vector<int64_t> sizes;
  for (const size_t i : group) sizes.push_back(weights[i].size(0));
  return sizes;
}

// Calls f(i, part of weight i) for the product of a group or for its weight gradient.
template <class F>
void for_each_weight(const Tensor& group_tensor, const WeightGroup& group, at::TensorList weights,
                     int64_t dim, const F& f) {
  if (group.size() == 1) return f(group[0], group_tensor);
  const auto parts = group_tensor.split_with_sizes(features(weights, group), dim);
  for (size_t n = 0; n < group.size(); ++n) f(group[n], parts[n]);
}

Tensor concat_weights(at::TensorList weights, const WeightGroup& group) {
  if (group.size() == 1) return weights[group[0]];
  Tensors group_tensor;
  for (const size_t i : group) group_tensor.push_back(weights[i]);
  return at::cat(group_tensor);
}

// The weights of each group in `dtype`, concatenated by rows. A single weight that already has this dtype is
// not copied.
Tensors cast_weights(at::TensorList weights, const std::vector<WeightGroup>& groups, at::ScalarType dtype) {
  Tensors outputs;
  if (std::ranges::all_of(weights, [&](const Tensor& w) { return w.scalar_type() == dtype; })) {
    for (const auto& group : groups) outputs.push_back(concat_weights(weights, group));
    return outputs;
  }
  Tensors ordered;
  std::vector<int64_t> sizes, group_sizes;
  int64_t all = 0;
  for (const auto& group : groups) {
    const auto before = all;
    for (const size_t i : group) {
      ordered.push_back(weights[i]);
      sizes.push_back(weights[i].size(0));
      all += sizes.back();
    }
    group_sizes.push_back(all - before);
  }
  const auto copy = at::empty({all, weights[0].size(1)}, weights[0].options().dtype(dtype));
  at::_foreach_copy_(copy.split_with_sizes(sizes), ordered);
  return copy.split_with_sizes(group_sizes);
}

// Concatenates the gradients of a group to [..., sum of features]; zeros for undefined ones; undefined if all
// are.
Tensor concat_gradients(const variable_list& dys, const WeightGroup& group, at::TensorList weights) {
  if (group.size() == 1) return dys[group[0]];
  const auto first_defined = std::ranges::find_if(group, [&](size_t i) { return dys[i].defined(); });
  if (first_defined == group.end()) return {};
  Tensors parts;
  for (const size_t i : group) {
    parts.push_back(dys[i].defined() ? dys[i]
                                     : dys[*first_defined].new_zeros_symint(
                                           with_last_size(dys[*first_defined], weights[i].size(0))));
  }
  return at::cat(parts, -1);
}

// Keys under which a node saves each weight (for second derivatives) and the version of the weight.
std::string weight_key(size_t i) { return "weight " + std::to_string(i); }
std::string version_key(size_t i) { return "version " + std::to_string(i); }
int64_t tensor_version(const Tensor& x) { return x.is_inference() ? -1 : int64_t(x._version()); }

struct Linears : Function<Linears> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, at::TensorList weights) {
    const auto groups = group_weights(weights);
    auto saved = cast_weights(weights, groups, x.scalar_type());
    const auto rows = flatten_rows(x);
    variable_list outputs(weights.size());
    for (size_t n = 0; n < groups.size(); ++n) {  // the dtypes are those of autocast already
      const auto y = at::_unsafe_view_symint(rows.mm(saved[n].t()), with_last_size(x, saved[n].size(0)));
      for_each_weight(y, groups[n], weights, -1, [&](size_t i, const Tensor& part) { outputs[i] = part; });
    }
    const bool needs_dweights =
        std::ranges::any_of(weights, [](const Tensor& w) { return w.requires_grad(); });
    if (!x.requires_grad()) saved.assign(saved.size(), {});
    saved.push_back(needs_dweights ? x : Tensor());
    ctx->save_for_backward(std::move(saved));
    for (size_t i = 0; i < weights.size(); ++i) {  // one entry each: compiled autograd supports no lists
      ctx->saved_data[weight_key(i)] = weights[i];
      ctx->saved_data[version_key(i)] = tensor_version(weights[i]);
    }
    ctx->set_materialize_grads(false);
    return outputs;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& dys) {
    const auto saved = ctx->get_saved_variables();
    Tensors weights;
    bool is_modified = false;
    for (size_t i = 0; i < dys.size(); ++i) {
      weights.push_back(ctx->saved_data[weight_key(i)].toTensor());
      is_modified |= ctx->saved_data[version_key(i)].toInt() != tensor_version(weights[i]);
    }
    const auto groups = group_weights(weights);
    const bool needs_dx = ctx->needs_input_grad(0);
    // torch.compile fuses sums into their readers, and clones the target of in-place operators.
    const bool is_traced = c10::impl::TorchDispatchModeTLS::any_modes_set();
    TORCH_CHECK(!needs_dx || !is_double_backward() || !is_modified,
                "girih: linears: a weight has been modified by an inplace operation since the forward");
    Tensor dx, like;  // like: has the sizes of dx except for the last
    variable_list results(1 + weights.size());
    for (size_t n = 0; n < groups.size(); ++n) {
      const auto& group = groups[n];
      auto dy = concat_gradients(dys, group, weights);
      if (!dy.defined()) continue;
      like = dy;
      dy = flatten_rows(dy);
      if (needs_dx && is_double_backward()) {
        const auto w = concat_weights(weights, group).to(dy.scalar_type());
        dx = dx.defined() ? at::addmm(dx, dy, w) : dy.mm(w);
      } else if (needs_dx && dx.defined() && is_traced) {
        dx = dx + dy.mm(saved[n]);
      } else if (needs_dx && dx.defined()) {
        // Backward under autocast: dx has the dtype of autocast, and in-place operators are not cast.
        dx.addmm_(dy.to(dx.scalar_type()), saved[n].to(dx.scalar_type()));
      } else if (needs_dx) {
        dx = dy.mm(saved[n]);
      }
      const auto needs_gradient = [&](size_t i) { return ctx->needs_input_grad(1 + i); };
      if (!std::ranges::any_of(group, needs_gradient)) continue;
      for_each_weight(matrix_product(dy.t(), flatten_rows(saved.back()), weights[group[0]].scalar_type()),
                      group, weights, 0, [&](size_t i, const Tensor& part) {
                        if (needs_gradient(i) && dys[i].defined()) results[1 + i] = part;
                      });
    }
    if (dx.defined()) results[0] = dx.view_symint(with_last_size(like, weights[0].size(1)));
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
