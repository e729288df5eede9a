#include "check.h"

#include <algorithm>
#include <sstream>

namespace girih {
namespace {

bool is_data_type(at::ScalarType type) {
  return type == at::kFloat || type == at::kDouble || type == at::kBFloat16 || type == at::kHalf;
}

bool equal(const c10::SymInt& a, const c10::SymInt& b) { return a.sym_eq(b).expect_true(__FILE__, __LINE__); }

}  // namespace

Check::Check(std::string_view op, std::string_view first_name, const Tensor& first)
    : op_(op), first_name_(first_name), first_(first) {
  GIRIH_CHECK(is_data_type(first.scalar_type()), op_, ": ", first_name_, " is ", first.scalar_type(),
              " but should be float32, float64, bfloat16 or float16");
}

void Check::device(std::string_view name, const Tensor& tensor) const {
  GIRIH_CHECK(tensor.device() == first_.device(), op_, ": ", name, " is on ", tensor.device(),
              " but should be on the device of ", first_name_, ", ", first_.device());
}

void Check::same_dtype(std::string_view name, const Tensor& tensor) const {
  device(name, tensor);
  GIRIH_CHECK(tensor.scalar_type() == first_.scalar_type(), op_, ": ", name, " is ", tensor.scalar_type(),
              " but should have the dtype of ", first_name_, ", ", first_.scalar_type());
}

void Check::floating(std::string_view name, const Tensor& tensor) const {
  device(name, tensor);
  GIRIH_CHECK(is_data_type(tensor.scalar_type()), op_, ": ", name, " is ", tensor.scalar_type(),
              " but should be float32, float64, bfloat16 or float16");
}

// fp32, or fp64 when the inputs are fp64
void Check::state_dtype(std::string_view name, const Tensor& tensor) const {
  device(name, tensor);
  GIRIH_CHECK(tensor.scalar_type() == accumulate_type(first_), op_, ": ", name, " is ", tensor.scalar_type(),
              " but should be ", accumulate_type(first_), " when ", first_name_, " is ",
              first_.scalar_type());
}

void Check::position(const Tensor& tensor, const c10::SymInt& N) const {
  device("state_position", tensor);
  GIRIH_CHECK(tensor.scalar_type() == at::kLong, op_, ": state_position is ", tensor.scalar_type(),
              " but should be int64");
  shape("state_position", tensor, {N}, "[N]");
}

void Check::rank(std::string_view name, const Tensor& tensor, int64_t dims, std::string_view letters) const {
  GIRIH_CHECK(tensor.dim() == dims, op_, ": ", name, " has shape ", tensor.sym_sizes(), " but should be ",
              letters);
}

void Check::shape(std::string_view name, const Tensor& tensor, Shape expected,
                  std::string_view letters) const {
  const auto sizes = tensor.sym_sizes();
  const bool same =
      sizes.size() == expected.size() && std::equal(sizes.begin(), sizes.end(), expected.begin(), equal);
  GIRIH_CHECK(same, op_, ": ", name, " has shape ", sizes, " but should be ", letters, " = ",
              c10::SymIntArrayRef(expected.begin(), expected.size()));
}

void Check::same_shape(std::string_view name, const Tensor& tensor) const {
  const auto sizes = tensor.sym_sizes(), expected = first_.sym_sizes();
  const bool same =
      sizes.size() == expected.size() && std::equal(sizes.begin(), sizes.end(), expected.begin(), equal);
  GIRIH_CHECK(same, op_, ": ", name, " has shape ", sizes, " but should have the shape of ", first_name_,
              ", ", expected);
}

void Check::over_last(std::string_view name, const Tensor& tensor, std::string_view letters) const {
  GIRIH_CHECK(tensor.dim() == 1 && equal(tensor.sym_size(0), first_.sym_size(-1)), op_, ": ", name,
              " has shape ", tensor.sym_sizes(), " but should be ", letters, ", the last dimension of ",
              first_name_, ", whose shape is ", first_.sym_sizes());
}

void Check::at_least_one(std::string_view letters, const c10::SymInt& size) const {
  GIRIH_CHECK(size >= 1, op_, ": ", letters, " is ", size, " but should be at least 1");
}

void Check::grouped(const c10::SymInt& query_heads, const c10::SymInt& heads) const {
  at_least_one("k's H", heads);
  GIRIH_CHECK(query_heads >= 1, op_, ": ", first_name_, " has ", query_heads,
              " heads but should have at least 1");
  GIRIH_CHECK(equal(query_heads % heads, 0), op_, ": ", first_name_, " has ", query_heads,
              " heads but should have a multiple of k's ", heads);
}

void Check::one_of(std::string_view name, std::string_view value,
                   std::initializer_list<std::string_view> allowed) const {
  std::ostringstream list;
  for (const auto& word : allowed) list << (list.tellp() > 0 ? ", " : "") << word;
  GIRIH_CHECK(std::find(allowed.begin(), allowed.end(), value) != allowed.end(), op_, ": ", name, " is '",
              value, "' but should be one of ", list.str());
}

void Check::integers(std::string_view name, const Tensor& tensor) const {
  device(name, tensor);
  GIRIH_CHECK(tensor.scalar_type() == at::kLong || tensor.scalar_type() == at::kInt, op_, ": ", name, " is ",
              tensor.scalar_type(), " but should be int32 or int64");
}

c10::SymInt Check::packed(std::string_view name, const OptionalTensor& cu, const c10::SymInt& B) const {
  if (!given(cu)) return B;
  integers(name, *cu);
  GIRIH_CHECK(cu->dim() == 1 && cu->sym_size(0) >= 1, op_, ": ", name, " has shape ", cu->sym_sizes(),
              " but should be [N + 1]");
  GIRIH_CHECK(equal(B, 1), op_, ": ", name, " packs sequences into one row, so B should be 1 and is ", B);
  return cu->sym_size(0) - 1;
}

c10::SymInt Check::sequences(const OptionalTensor& cu_seqlens, const c10::SymInt& B) const {
  if (!given(cu_seqlens) || cu_seqlens->dim() != 2) return packed("cu_seqlens", cu_seqlens, B);
  integers("cu_seqlens", *cu_seqlens);
  shape("cu_seqlens", *cu_seqlens, {B, 2}, "[N + 1] or [B, 2]");
  return B;
}

Check::Sizes Check::qkv(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& cu_seqlens,
                        const Letters& letters, int64_t n) const {
  const auto of_q = c10::str("[B, T, HQ, ", letters.key, "]"),
             of_k = c10::str("[B, ", letters.rows, ", H, ", letters.key, "]"),
             of_v = c10::str("[B, ", letters.rows, ", H, ", letters.value, "]");
  rank("q", q, 4, of_q);
  rank("k", k, 4, of_k);
  rank("v", v, 4, of_v);
  const Sizes s{q.sym_size(0),
                q.sym_size(1),
                q.sym_size(2),
                k.sym_size(2),
                q.sym_size(3),
                v.sym_size(3),
                sequences(cu_seqlens, q.sym_size(0))};
  grouped(s.HQ, s.H);
  at_least_one(letters.key, s.key);
  at_least_one(letters.value, s.value);
  same_dtype("k", k);
  same_dtype("v", v);
  shape("k", k, {s.B, s.T * n, s.H, s.key}, of_k);
  shape("v", v, {s.B, s.T * n, s.H, s.value}, of_v);
  return s;
}

void Check::per_head(std::string_view name, const OptionalTensor& tensor, const Sizes& sizes) const {
  if (!given(tensor)) return;
  floating(name, *tensor);
  shape(name, *tensor, {sizes.B, sizes.T, sizes.H}, "[B, T, H]");
}

void Check::state(std::string_view name, const OptionalTensor& tensor, Shape expected,
                  std::string_view letters) const {
  if (!given(tensor)) return;
  state_dtype(name, *tensor);
  shape(name, *tensor, expected, letters);
}

}  // namespace girih
