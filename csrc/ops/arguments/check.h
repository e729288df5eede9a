// Checks of arguments before anything runs, with the same messages on CPU, CUDA and Meta.
#pragma once

#include <ATen/ATen.h>

#include <cmath>
#include <initializer_list>
#include <optional>
#include <string_view>

#include "../registration/operator.h"

// ValueError in Python. The message names the argument, its value and the expected value.
#define GIRIH_CHECK(condition, ...) TORCH_CHECK_VALUE(condition, "girih.", __VA_ARGS__)

namespace girih {

using at::Tensor;
using OptionalTensor = std::optional<at::Tensor>;

inline bool is_defined(const OptionalTensor& tensor) { return tensor.has_value() && tensor->defined(); }

// Whether cu_seqlens [N + 1] packs N sequences into one row; cu_seqlens [B, 2] bounds the sequence of each
// row.
inline bool is_packed(const OptionalTensor& cu_seqlens) {
  return is_defined(cu_seqlens) && cu_seqlens->dim() == 1;
}

// The scale of the queries: 1 / sqrt(D) by default.
inline double scale_or_default(const std::optional<double>& scale, int64_t D) {
  return scale.value_or(1 / std::sqrt(double(D)));
}

// One argument of a call: a tensor or the value of an option. Refers to the argument, which must outlive it.
class Argument {
 public:
  // NOLINTBEGIN(google-explicit-constructor): arguments convert implicitly in the list of a call
  Argument(const Tensor& tensor) : tensor_(&tensor) {}
  Argument(const OptionalTensor& tensor) : tensor_(tensor ? &*tensor : nullptr) {}
  Argument(bool) {}  // no condition to check
  Argument(int64_t number) : integer_(number) {}
  Argument(double number) : number_(number) {}
  Argument(std::string_view word) : word_(word) {}
  template <class T>
  requires(!std::is_same_v<T, Tensor>) Argument(const std::optional<T>& value) {
    if (value) *this = Argument(*value);
  }
  // NOLINTEND(google-explicit-constructor)

  const Tensor* tensor() const { return tensor_ != nullptr && tensor_->defined() ? tensor_ : nullptr; }
  const std::optional<int64_t>& integer() const { return integer_; }
  const std::optional<double>& number() const { return number_; }
  const std::optional<std::string_view>& word() const { return word_; }

 private:
  const Tensor* tensor_ = nullptr;
  std::optional<int64_t> integer_;
  std::optional<double> number_;
  std::optional<std::string_view> word_;
};

// The sizes of one call, by the letters of the shapes of the operator. A letter that occurs in absent tensors
// only has no size.
class Sizes {
 public:
  explicit Sizes(const Operator& op) : op_(&op), sizes_(op.letters.size()) {}

  const c10::SymInt& operator[](std::string_view letter) const { return *sizes_[op_->letter(letter)]; }
  std::optional<c10::SymInt>& get(int letter) { return sizes_[letter]; }
  const std::optional<c10::SymInt>& get(int letter) const { return sizes_[letter]; }

 private:
  const Operator* op_;
  c10::SmallVector<std::optional<c10::SymInt>, 12> sizes_;
};

// Checks the arguments of a call, in the order of the schema of X, against the declaration of the operator:
// devices, dtypes, shapes, heads, packing, strings and ranges, and on the CPU the values of integer tensors.
// The problem.h of an operator has its other conditions.
Sizes check(const Operator& op, std::initializer_list<Argument> arguments);

// Additional conditions of X_step: one token, and state tensors that can be written and do not overlap. Call
// it before anything is written; `states` is in the order of the declaration.
void check_step(const Operator& op, const Tensor& first, at::ArrayRef<Argument> states);

// The dtype of states and sums: fp64 for fp64 inputs, else fp32.
inline at::ScalarType accumulate_type(const Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace girih
