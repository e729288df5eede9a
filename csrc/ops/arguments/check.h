// Wrong arguments are refused before anything runs, in the same words on CPU, CUDA and Meta.
#pragma once

#include <ATen/ATen.h>

#include <initializer_list>
#include <optional>
#include <string_view>

#include "../registration/operator.h"

// ValueError in Python; the message names the argument, what it is and what it should be.
#define GIRIH_CHECK(condition, ...) TORCH_CHECK_VALUE(condition, "girih.", __VA_ARGS__)

namespace girih {

using at::Tensor;
using OptionalTensor = std::optional<at::Tensor>;

inline bool given(const OptionalTensor& tensor) { return tensor.has_value() && tensor->defined(); }

// One argument of a call, whatever its type: a tensor, or the value of an option. It refers to what it is
// made of.
class Argument {
 public:
  // NOLINTBEGIN(google-explicit-constructor): a call's arguments are listed as they are
  Argument(const Tensor& tensor) : tensor_(&tensor) {}
  Argument(const OptionalTensor& tensor) : tensor_(tensor ? &*tensor : nullptr) {}
  Argument(bool) {}
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

// The sizes of one call, by the letters of the operator's shapes. A letter that only absent tensors have has
// none.
class Sizes {
 public:
  explicit Sizes(const Operator& op) : op_(&op), sizes_(op.letters.size()) {}

  const c10::SymInt& operator[](std::string_view letter) const { return *sizes_[op_->letter(letter)]; }
  std::optional<c10::SymInt>& at(int letter) { return sizes_[letter]; }
  const std::optional<c10::SymInt>& at(int letter) const { return sizes_[letter]; }

 private:
  const Operator* op_;
  c10::SmallVector<std::optional<c10::SymInt>, 12> sizes_;
};

// Checks a call's arguments, in the order of X's schema, against all that the description says: devices,
// dtypes, shapes, heads, packing, words and ranges; on the CPU what integers hold too. What an operator asks
// beyond that is in its problem.h.
Sizes check(const Operator& op, std::initializer_list<Argument> arguments);

// What X_step asks beyond X: one token, and a state whose tensors can be written, each in memory of its own.
// To be called before anything is written; `states` in the order of the description.
void check_step(const Operator& op, const Tensor& first, at::ArrayRef<Argument> states);

// The dtype of states and of what is summed: fp32, fp64 for fp64.
inline at::ScalarType accumulate_type(const Tensor& like) {
  return like.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace girih
