// Checks of the arguments of a call against the declaration of its operator.
#include "check.h"

#include <ATen/MemoryOverlap.h>

#include <algorithm>
#include <cmath>

namespace girih {
namespace {

bool is_floating(at::ScalarType type) {
  return type == at::kFloat || type == at::kDouble || type == at::kBFloat16 || type == at::kHalf;
}

bool equal(const c10::SymInt& a, const c10::SymInt& b) { return a.sym_eq(b).expect_true(__FILE__, __LINE__); }

// Whether the values can be read on the host without a synchronisation. Fake tensors have no storage.
bool is_host_readable(const Tensor& tensor) {
  return tensor.has_storage() && tensor.storage().device_type() == at::kCPU;
}

// Whether the tensor has symbolic sizes; such a tensor has no memory.
bool has_symbolic_sizes(const Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

// "1 to 64", "at least 1" or "a finite number".
template <class Number>
std::string format_range(Number least, Number most) {
  const bool has_min = least > std::numeric_limits<Number>::lowest(),
             has_max = most < std::numeric_limits<Number>::max();
  if (has_min && has_max) return c10::str(least, " to ", most);
  return has_min ? c10::str("at least ", least) : "a finite number";
}

// The bound of an integer option, saturated.
int64_t to_integer_bound(double bound) {
  constexpr auto most = std::numeric_limits<int64_t>::max();
  return std::abs(bound) < 0x1p63 ? int64_t(bound) : bound > 0 ? most : -most - 1;
}

// The arguments of one call, and the sizes that are already known.
class CallChecker {
 public:
  CallChecker(const Operator& op, std::initializer_list<Argument> arguments)
      : sizes(op), op_(op), arguments_(arguments.begin()), size_owner_(op.letters.size(), -1) {
    TORCH_INTERNAL_ASSERT(arguments.size() == op.input_count() + op.options.size());
  }

  void check_options() {
    for (size_t i = 0; i < op_.options.size(); ++i) {
      const auto& option = op_.options[i];
      const auto& value = arguments_[op_.input_count() + i];
      if (value.word()) check_word(option, *value.word());
      if (value.number()) {
        GIRIH_CHECK(std::isfinite(*value.number()) && *value.number() >= option.least &&
                        *value.number() <= option.most,
                    op_.name, ": ", option.name, " is ", *value.number(), " but should be ",
                    format_range(option.least, option.most));
      }
      if (!value.integer()) continue;
      const auto least = to_integer_bound(option.least), most = to_integer_bound(option.most);
      GIRIH_CHECK(*value.integer() >= least && *value.integer() <= most, op_.name, ": ", option.name, " is ",
                  *value.integer(), " but should be ", format_range(least, most));
      const auto letter = std::ranges::find(op_.letters, option.name, &Operator::Letter::name);
      if (letter != op_.letters.end()) sizes.get(int(letter - op_.letters.begin())) = *value.integer();
    }
  }

  void check_tensors() {
    for (size_t i = 0; i < op_.tensors.size(); ++i) {
      const auto& argument = op_.tensors[i];
      const auto* tensor = arguments_[i].tensor();
      if (tensor == nullptr) {
        GIRIH_CHECK(argument.optional || i >= op_.data_count, op_.name, ": ", argument.name,
                    " is None but should be a tensor ", argument.shapes);
        continue;
      }
      check_dtype(argument, *tensor);
      check_shape(int(i), *tensor);
      if (i == 0) check_packing();
    }
    check_heads();
  }

  // Checks the values of integer tensors on the CPU. On a GPU a check would synchronise; there the kernels
  // clamp the values and access valid memory only.
  void check_values() const {
    for (size_t i = 0; i < op_.tensors.size(); ++i) {
      if (op_.tensors[i].kind == TensorKind::position) check_position(int(i));
    }
    if (!op_.packing.empty()) check_bounds();
  }

  Sizes sizes;

 private:
  const Tensor& first() const { return *arguments_[0].tensor(); }
  const std::string& first_name() const { return op_.tensors[0].name; }

  void check_word(const Option& option, std::string_view value) const {
    GIRIH_CHECK(std::ranges::find(option.words, value) != option.words.end(), op_.name, ": ", option.name,
                " is '", value, "' but should be one of ", c10::Join(", ", option.words));
  }

  void check_dtype(const TensorArgument& argument, const Tensor& tensor) const {
    const auto type = tensor.scalar_type();
    GIRIH_CHECK(tensor.device() == first().device(), op_.name, ": ", argument.name, " is on ",
                tensor.device(), " but should be on the device of ", first_name(), ", ", first().device());
    switch (argument.kind) {
      case TensorKind::data:
        if (&tensor != &first()) {
          GIRIH_CHECK(type == first().scalar_type(), op_.name, ": ", argument.name, " is ", type,
                      " but should have the dtype of ", first_name(), ", ", first().scalar_type());
          break;
        }
        [[fallthrough]];
      case TensorKind::floating:
        GIRIH_CHECK(is_floating(type), op_.name, ": ", argument.name, " is ", type,
                    " but should be float32, float64, bfloat16 or float16");
        break;
      case TensorKind::state:
        GIRIH_CHECK(type == accumulate_type(first()), op_.name, ": ", argument.name, " is ", type,
                    " but should be ", accumulate_type(first()), " when ", first_name(), " is ",
                    first().scalar_type());
        break;
      case TensorKind::position:
        GIRIH_CHECK(type == at::kLong, op_.name, ": ", argument.name, " is ", type, " but should be int64");
    }
  }

  // The pattern with the number of dimensions of the tensor, or nullptr.
  static const ShapePattern* pattern_of(const TensorArgument& argument, const Tensor& tensor) {
    for (const auto& pattern : argument.patterns) {
      const auto own = int64_t(pattern.dimensions.size());
      if (pattern.has_ellipsis ? tensor.dim() >= own : tensor.dim() == own) return &pattern;
    }
    return nullptr;
  }

  // The sizes that a pattern requires. A letter without a size takes the size of `tensor`.
  std::vector<c10::SymInt> expected_sizes(const ShapePattern& pattern, const Tensor& tensor) const {
    std::vector<c10::SymInt> all;
    const auto own = int64_t(pattern.dimensions.size());
    if (pattern.has_ellipsis) {
      const auto leading_sizes = first().sym_sizes().slice(0, first().dim() - own);
      all.assign(leading_sizes.begin(), leading_sizes.end());
    }
    for (int64_t d = 0; d < own; ++d) {
      const auto& dimension = pattern.dimensions[d];
      if (dimension.letter < 0) {
        all.emplace_back(dimension.offset);
      } else if (const auto& size = sizes.get(dimension.letter)) {
        auto value = *size;
        if (dimension.factor_letter >= 0) value = value * *sizes.get(dimension.factor_letter);
        all.push_back(dimension.offset != 0 ? value + dimension.offset : value);
      } else {
        all.push_back(tensor.sym_size(d - own));
      }
    }
    return all;
  }

  // The tensor from which the size of a dimension was read, for messages.
  std::string size_origin(const ShapePattern& pattern, int64_t d) const {
    if (d < 0) return c10::str(", as in ", first_name(), " ", first().sym_sizes());
    if (d >= int64_t(pattern.dimensions.size()) || pattern.dimensions[d].letter < 0) return "";
    const auto letter = pattern.dimensions[d].letter;
    if (size_owner_[letter] < 0) return "";
    return c10::str(", ", op_.letters[letter].name, " as in ", op_.tensors[size_owner_[letter]].name, " ",
                    arguments_[size_owner_[letter]].tensor()->sym_sizes());
  }

  void check_shape(int i, const Tensor& tensor) {
    const auto& argument = op_.tensors[i];
    const auto* pattern = pattern_of(argument, tensor);
    GIRIH_CHECK(pattern != nullptr, op_.name, ": ", argument.name, " has shape ", tensor.sym_sizes(),
                " but should be ", argument.shapes);
    const auto expected_shape = expected_sizes(*pattern, tensor);
    const auto have = tensor.sym_sizes();
    const auto other =
        std::mismatch(have.begin(), have.end(), expected_shape.begin(), expected_shape.end(), equal).first;
    const auto own = int64_t(pattern->dimensions.size());
    GIRIH_CHECK(other == have.end() && have.size() == expected_shape.size(), op_.name, ": ", argument.name,
                " has shape ", have, " but should be ", argument.shapes, " = ",
                c10::SymIntArrayRef(expected_shape), size_origin(*pattern, other - have.end() + own));
    for (int64_t d = 0; d < own; ++d) {
      const auto letter = pattern->dimensions[d].letter;
      if (letter < 0 || sizes.get(letter)) continue;
      const auto& limit = op_.letters[letter];
      const auto& size = sizes.get(letter) = tensor.sym_size(d - own);
      size_owner_[letter] = i;
      GIRIH_CHECK((limit.least == 0 || *size >= limit.least) &&
                      (limit.most == std::numeric_limits<int64_t>::max() || *size <= limit.most),
                  op_.name, ": ", argument.name, "'s ", limit.name, " is ", *size, " but should be ",
                  format_range(limit.least, limit.most));
    }
  }

  // Sets N, the number of sequences. cu [N + 1] packs N sequences into one row; without cu each row is one
  // sequence. cu_seqlens may also be [B, 2], begin and end of the sequence of each row.
  void check_packing() {
    if (op_.packing.empty()) return;
    const auto &name = op_.packing, &first = op_.tensors[0].name;
    const auto& B = *sizes.get(op_.letter("B"));
    auto& N = sizes.get(op_.letter("N"));
    const auto* cu = arguments_[op_.tensors.size()].tensor();
    if (cu == nullptr) {
      N = B;
      return;
    }
    const bool is_per_row = cu->dim() == 2 && name == "cu_seqlens";
    GIRIH_CHECK(cu->device() == this->first().device(), op_.name, ": ", name, " is on ", cu->device(),
                " but should be on the device of ", first, ", ", this->first().device());
    GIRIH_CHECK(cu->scalar_type() == at::kLong || cu->scalar_type() == at::kInt, op_.name, ": ", name, " is ",
                cu->scalar_type(), " but should be int32 or int64");
    const char* shapes = name == "cu_seqlens" ? "[N + 1] or [B, 2]" : "[N + 1]";
    GIRIH_CHECK(is_per_row ? equal(cu->sym_size(0), B) && equal(cu->sym_size(1), 2)
                           : cu->dim() == 1 && cu->sym_size(0) >= 1,
                op_.name, ": ", name, " has shape ", cu->sym_sizes(), " but should be ", shapes,
                " where B = ", B);
    GIRIH_CHECK(is_per_row || equal(B, 1), op_.name, ": ", name,
                " packs sequences into one row, so B should be 1 but is ", B);
    N = is_per_row ? B : cu->sym_size(0) - 1;
  }

  // Positions are 0 to chunk - 1.
  void check_position(int i) const {
    const auto* tensor = arguments_[i].tensor();
    const auto chunk = std::ranges::find(op_.options, "chunk", &Option::name) - op_.options.begin();
    const auto& length = arguments_[op_.input_count() + chunk].integer();
    if (tensor == nullptr || !length || !is_host_readable(*tensor)) return;
    const auto all = tensor->contiguous();
    for (int64_t n = 0; n < all.numel(); ++n) {
      const auto position = all.const_data_ptr<int64_t>()[n];
      GIRIH_CHECK(position >= 0 && position < *length, op_.name, ": ", op_.tensors[i].name, " holds ",
                  position, " but should be 0 to ", *length - 1, ", a position in a chunk of ", *length);
    }
  }

  // cu does not decrease and is at most T (cu_seqlens) or the number of chunks (cu_chunks). Each row of [B,
  // 2] is checked on its own.
  void check_bounds() const {
    const auto* cu = arguments_[op_.tensors.size()].tensor();
    if (cu == nullptr || !is_host_readable(*cu) || !is_host_readable(first())) return;
    auto most = sizes["T"].expect_int();
    if (op_.packing == "cu_chunks") {
      const auto chunk = std::ranges::find(op_.options, "chunk", &Option::name) - op_.options.begin();
      const auto length = *arguments_[op_.input_count() + chunk].integer();
      most = (most + length - 1) / length;
    }
    const auto all = cu->to(at::kLong).contiguous();
    const auto row_length = cu->dim() == 2 ? 2 : cu->numel();
    int64_t before = 0;
    for (int64_t i = 0; i < all.numel(); ++i) {
      if (i % row_length == 0) before = 0;
      const auto bound = all.const_data_ptr<int64_t>()[i];
      GIRIH_CHECK(bound >= before && bound <= most, op_.name, ": ", op_.packing, " holds ", bound, " after ",
                  before, " but should not decrease and should be 0 to ", most);
      before = bound;
    }
  }

  // The heads of q are a multiple of those of the memory. If keys have a letter of their own (HK), the heads
  // of the memory may also be a multiple of those of q and of k.
  void check_heads() const {
    const auto has = [&](const char* name) {
      return std::ranges::find(op_.letters, name, &Operator::Letter::name) != op_.letters.end();
    };
    if (!has("HQ")) return;
    const auto &HQ = sizes["HQ"], &H = sizes["H"];
    const auto& memory_name = op_.tensors[size_owner_[op_.letter("H")]].name;
    const bool shares = has("HK");
    GIRIH_CHECK(equal(HQ % H, 0) || (shares && equal(H % HQ, 0)), op_.name, ": ", first_name(), " has ", HQ,
                " heads but should have a multiple ", shares ? "or a divisor " : "", "of ", memory_name,
                "'s ", H);
    GIRIH_CHECK(!shares || equal(H % sizes["HK"], 0), op_.name, ": ",
                op_.tensors[size_owner_[op_.letter("HK")]].name, " has ", sizes["HK"],
                " heads but should have a divisor of ", memory_name, "'s ", H);
  }

  const Operator& op_;
  const Argument* arguments_;
  c10::SmallVector<int, 12> size_owner_;  // per letter: the tensor from which its size was read, or -1
};

}  // namespace

Sizes check(const Operator& op, std::initializer_list<Argument> arguments) {
  CallChecker checker(op, arguments);
  checker.check_options();
  checker.check_tensors();
  checker.check_values();
  return std::move(checker.sizes);
}

void check_step(const Operator& op, const Tensor& first, at::ArrayRef<Argument> states) {
  GIRIH_CHECK(!first.defined() || (first.dim() > 1 && first.sym_size(1) == 1), op.name,
              "_step takes one token: ", op.tensors[0].name, " should have T = 1 but has shape ",
              first.sym_sizes());
  for (size_t i = 0; i < states.size(); ++i) {
    const auto& argument = op.tensors[op.data_count + i];
    const auto* state = states[i].tensor();
    GIRIH_CHECK(state != nullptr || argument.optional, op.name, "_step: ", argument.name,
                " is None but is written in place: make the state of a first token with start()");
    if (state == nullptr) continue;
    GIRIH_CHECK(at::has_internal_overlap(*state) != at::MemOverlap::Yes, op.name, "_step: ", argument.name,
                " is an expanded or negated view but is written in place: pass a copy");
    for (size_t j = 0; j < i; ++j) {
      const auto* other = states[j].tensor();
      if (other == nullptr || has_symbolic_sizes(*state) || has_symbolic_sizes(*other)) continue;
      const auto overlap = at::get_overlap_status(*state, *other);
      GIRIH_CHECK(overlap != at::MemOverlapStatus::Full && overlap != at::MemOverlapStatus::Partial, op.name,
                  "_step: ", argument.name, " shares memory with ", op.tensors[op.data_count + j].name,
                  " but both are written in place: pass a copy of one of them");
    }
  }
}

}  // namespace girih
