// Wrong arguments are refused before anything runs, in the same words on CPU, CUDA and Meta.
#pragma once

#include <ATen/ATen.h>

#include <initializer_list>
#include <optional>
#include <string_view>
#include <utility>

// ValueError in Python; the message names the argument, what it is and what it should be.
#define GIRIH_CHECK(condition, ...) TORCH_CHECK_VALUE(condition, "girih.", __VA_ARGS__)

namespace girih {

using at::Tensor;
using OptionalTensor = std::optional<at::Tensor>;
using Shape = std::initializer_list<c10::SymInt>;

inline bool given(const OptionalTensor& tensor) { return tensor.has_value() && tensor->defined(); }

// The checks of one call of one operator. `first` is the argument whose device and dtype the others follow.
class Check {
 public:
  Check(std::string_view op, std::string_view first_name, const Tensor& first);

  // q, k, v, ...: first's dtype, one of the four floating dtypes
  void same_dtype(std::string_view name, const Tensor& tensor) const;
  // gates, step sizes: any floating dtype
  void floating(std::string_view name, const Tensor& tensor) const;
  // int64 [N] on the same device
  void position(const Tensor& tensor, const c10::SymInt& N) const;

  void rank(std::string_view name, const Tensor& tensor, int64_t dims, std::string_view letters) const;
  void shape(std::string_view name, const Tensor& tensor, Shape expected, std::string_view letters) const;
  // first's shape
  void same_shape(std::string_view name, const Tensor& tensor) const;
  // one element for every index of first's last dimension
  void over_last(std::string_view name, const Tensor& tensor, std::string_view letters) const;
  void at_least_one(std::string_view letters, const c10::SymInt& size) const;
  // heads of q: a multiple of the memory's heads
  void grouped(const c10::SymInt& query_heads, const c10::SymInt& heads) const;
  void one_of(std::string_view name, std::string_view value,
              std::initializer_list<std::string_view> allowed) const;

  // The number of sequences: B, or what `cu` packs into one row. cu: int32 or int64 [N + 1], with B == 1.
  c10::SymInt packed(std::string_view name, const OptionalTensor& cu, const c10::SymInt& B) const;
  // The same of cu_seqlens, which may also be [B, 2], the bounds of the one sequence in every row.
  c10::SymInt sequences(const OptionalTensor& cu_seqlens, const c10::SymInt& B) const;

  // Sizes of q [B, T, HQ, key], k [B, T * n, H, key] and v [B, T * n, H, value], checked in all they share.
  struct Sizes {
    c10::SymInt B, T, HQ, H, key, value, N;
  };
  // What messages call the sizes; `rows` is the one of k and v along time.
  struct Letters {
    std::string_view key = "D", value = "V", rows = "T";
  };
  Sizes qkv(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& cu_seqlens,
            const Letters& letters, int64_t n = 1) const;
  // one gate or step size a head
  void per_head(std::string_view name, const OptionalTensor& tensor, const Sizes& sizes) const;
  // a state's part, unless it is absent
  void state(std::string_view name, const OptionalTensor& tensor, Shape expected,
             std::string_view letters) const;

 private:
  void state_dtype(std::string_view name, const Tensor& tensor) const;
  void integers(std::string_view name, const Tensor& tensor) const;
  void device(std::string_view name, const Tensor& tensor) const;

  std::string_view op_, first_name_;
  const Tensor& first_;
};

// A step's `first` argument has one token.
inline void check_one_token(std::string_view op, std::string_view first_name, const Tensor& first) {
  GIRIH_CHECK(first.dim() > 1 && first.sym_size(1) == 1, op, "_step takes one token: ", first_name,
              " must have T = 1 and has shape ", first.sym_sizes());
}

// The dtype of states and of what is summed: fp32, fp64 for fp64.
inline at::ScalarType accumulate_type(const Tensor& like) {
  return like.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace girih
