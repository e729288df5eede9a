// What an operator is: one description, from which its schemas, the checks of its arguments, what is the same
// for all operators (autograd, autocast, vmap, steps) and `torch.ops.girih.describe()` follow.
#pragma once

#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace girih {

// What a tensor holds decides which dtypes it may have and where autocast sends it.
enum class Kind {
  data,      // the dtype of the operator's first tensor; autocast's dtype
  floating,  // gates, step sizes, weights: any of the four floating dtypes; fp32, in which they are computed
  state,     // fp32, fp64 when the first tensor is; fp32
  position,  // int64 and without gradient: how many tokens of its chunk a sequence has read
};

// ---- the page in schema.cpp is written in these ----------------------------------------------------------

// "Tensor q" is required, "Tensor? g" may be absent. Shapes are written as messages show them, several joined
// by " or ": "[B, T, H] or [B, T, H, D]". A size is a letter, a number, a product "T * n" or a difference "W
// - 1"; "[..., dim]" has the first tensor's sizes in front.
struct TensorDeclaration {
  std::string declaration, shapes;
  std::optional<Kind> kind = {};  // data; of a state's tensors state
};

// An argument that is no tensor, written as in a schema: "float? scale=None".
struct OptionDeclaration {
  std::string declaration;
  std::vector<std::string> words = {};  // what a str may be
  // What an int or a float may be. Neither nan nor infinite in any case.
  double least = std::numeric_limits<double>::lowest(), most = std::numeric_limits<double>::max();
};

struct Declaration {
  std::string name;
  std::vector<TensorDeclaration> data;
  std::vector<TensorDeclaration> state = {};    // "Tensor k": always returned; "Tensor? z": may be absent
  std::string packing = {};                     // "cu_seqlens", "cu_chunks": where packed sequences start
  std::vector<OptionDeclaration> options = {};  // one with the name of a letter is that size
  // Sizes by letter. B, T and N may be 0, all others are at least 1.
  struct Limit {
    std::string letter;
    int64_t least, most;
  };
  std::vector<Limit> limits = {};
  // What is returned, and what forward keeps for backward beyond its inputs (or nothing, of shape [0]).
  struct Result {
    std::string name, shapes;
  };
  Result output;
  std::vector<Result> saved = {};
};

// ---- and read into these
// -----------------------------------------------------------------------------------

struct Dimension {
  int letter = -1;  // in Operator::letters; -1: a number
  int times = -1;   // likewise: a factor, -1 for none
  int64_t plus = 0;
};

struct Pattern {
  bool leading = false;  // "..."
  std::vector<Dimension> dimensions;
};

struct TensorArgument {
  std::string name;  // a state's begins with "state_"
  bool optional;
  std::string shapes;
  std::vector<Pattern> patterns;
  Kind kind;
};

struct Option {
  std::string declaration, type, name, otherwise;  // the default is empty where there is none
  std::vector<std::string> words;
  double least, most;
};

// Four forms and an explanation are registered, with arguments in this order:
//   X         (data, state, packing, *, options)             -> (output, state)          what users call
//   X_forward (data, state, packing, *, options, bool save)  -> (output, state, saved)   CPU, CUDA, Meta
//   X_backward(grad of each output, data, state, packing, saved, *, options)
//                                                        -> a gradient of each tensor input, None for
//                                                        integers
//                                                           and what is absent
//   X_step    (data, state in place, *, options)             -> output                   one token
//   X_explain (data, state, packing, *, options, str device, bool step) -> (str path, str why)
class Operator {
 public:
  explicit Operator(const Declaration& declaration);

  std::string name, packing;
  std::vector<TensorArgument> tensors;  // data, then state
  size_t data;                          // how many of them are data
  std::vector<Option> options;
  Declaration::Result output;
  std::vector<Declaration::Result> saved;

  // Of all shapes, and N, the number of sequences.
  struct Letter {
    std::string name;
    int64_t least, most;
  };
  std::vector<Letter> letters;

  size_t states() const { return tensors.size() - data; }
  size_t inputs() const { return tensors.size() + (packing.empty() ? 0 : 1); }
  size_t outputs() const { return 1 + states(); }
  const Option& option(std::string_view name) const;
  int letter(std::string_view name) const;  // its place in `letters`

  std::string schema() const;
  std::string forward_schema() const;
  std::string backward_schema() const;
  std::string step_schema() const;
  std::string explain_schema() const;
};

// Every operator of the library, in schema.cpp.
const std::vector<Operator>& operators();

// The one of this name.
const Operator& describe(std::string_view name);

// All of them for readers in other languages, as JSON.
std::string description();

}  // namespace girih
