// The declaration of an operator. The schemas, the checks of arguments, autograd, autocast, vmap, steps and
// the JSON of all operators are derived from it.
#pragma once

#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace girih {

// The kind of a tensor determines its dtypes and its dtype under autocast.
enum class TensorKind {
  data,      // dtype of the first tensor; autocast: dtype of the region
  floating,  // gates, step sizes, weights: any of the four floating dtypes; autocast: fp32
  state,     // fp32, or fp64 if the first tensor is fp64; autocast: fp32
  position,  // int64, no gradient: tokens of the unfinished chunk that a sequence has read
};

// ---- declarations, as written in schema.cpp -------------------------------------------------------------

// "Tensor q" is required, "Tensor? g" is optional. `shapes` is the text of error messages; alternatives are
// joined by " or ": "[B, T, H] or [B, T, H, D]". A size is a letter, a number, a product "T * n" or a
// difference "W - 1". In "[..., dim]" the dots are the sizes of the first tensor.
struct TensorDeclaration {
  std::string declaration, shapes;
  std::optional<TensorKind> kind = {};  // default: data, or state for the tensors of a state
};

// An argument that is not a tensor, as in a schema: "float? scale=None".
struct OptionDeclaration {
  std::string declaration;
  std::vector<std::string> words = {};  // allowed values of a str
  // Range of an int or a float; nan and infinity are refused.
  double least = std::numeric_limits<double>::lowest(), most = std::numeric_limits<double>::max();
};

struct OperatorDeclaration {
  std::string name;
  std::vector<TensorDeclaration> data;
  std::vector<TensorDeclaration> state = {};  // "Tensor k" is always returned; "Tensor? z" is optional
  // "cu_seqlens" or "cu_chunks": the tensor with the boundaries of packed sequences; empty if the operator
  // has none
  std::string packing = {};
  std::vector<OptionDeclaration> options = {};  // an option named like a letter is this size
  // Range of a size. B, T and N are at least 0 by default, all others at least 1.
  struct Limit {
    std::string letter;
    int64_t least, most;
  };
  std::vector<Limit> limits = {};
  // The output, and what forward saves for backward beyond its inputs (shape [0] if nothing is saved).
  struct Result {
    std::string name, shapes;
  };
  Result output;
  std::vector<Result> saved = {};
};

// ---- parsed declarations --------------------------------------------------------------------------------

struct Dimension {
  int letter = -1;         // index into Operator::letters; -1: the size is a number
  int factor_letter = -1;  // index of the letter of a product; -1: no product
  int64_t offset = 0;
};

struct ShapePattern {
  bool has_ellipsis = false;  // "..."
  std::vector<Dimension> dimensions;
};

struct TensorArgument {
  std::string name;  // a tensor of the state has the prefix "state_"
  bool optional;
  std::string shapes;
  std::vector<ShapePattern> patterns;
  TensorKind kind;
};

struct Option {
  std::string declaration, type, name, default_value;  // default: empty if the option is required
  std::vector<std::string> words;
  double least, most;
};

// Five schemas are registered per operator, with arguments in this order:
//   X          (data, state, packing, *, options)            -> (output, state)           public
//   X_forward  (data, state, packing, *, options, bool save) -> (output, state, saved)    CPU, CUDA, Meta
//   X_backward (gradients of the outputs, data, state, packing, saved, *, options)
//                                                            -> one gradient per tensor input; None for
//                                                               integers and absent inputs
//   X_step     (data, state in place, *, options)            -> output                    one token
//   X_explain  (data, state, packing, *, options, str device, bool step) -> (str path, str why)
class Operator {
 public:
  explicit Operator(const OperatorDeclaration& declaration);

  std::string name;
  std::string packing;                  // as in OperatorDeclaration
  std::vector<TensorArgument> tensors;  // data, then state
  size_t data_count;                    // number of data tensors
  std::vector<Option> options;
  OperatorDeclaration::Result output;
  std::vector<OperatorDeclaration::Result> saved;

  // A size of the shapes, or N, the number of sequences.
  struct Letter {
    std::string name;
    int64_t least, most;
  };
  std::vector<Letter> letters;

  size_t state_count() const { return tensors.size() - data_count; }
  // Tensor inputs: data, state, packing.
  size_t input_count() const { return tensors.size() + (packing.empty() ? 0 : 1); }
  // Outputs of X: the output and the state.
  size_t output_count() const { return 1 + state_count(); }
  const Option& option(std::string_view name) const;
  int letter(std::string_view name) const;  // index into `letters`

  std::string schema() const;
  std::string forward_schema() const;
  std::string backward_schema() const;
  std::string step_schema() const;
  std::string explain_schema() const;
};

// All operators; defined in schema.cpp.
const std::vector<Operator>& operators();

// The operator of this name.
const Operator& get_operator(std::string_view name);

// All operators as JSON, for Python.
std::string operators_json();

}  // namespace girih
