// Parses the declaration of an operator, and writes its schemas and its JSON.
#include "operator.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <nlohmann/json.hpp>

namespace girih {
namespace {

using Strings = std::vector<std::string>;

std::string join(const Strings& parts) {
  std::string text;
  for (const auto& part : parts) text += (text.empty() ? "" : ", ") + part;
  return text;
}

Strings split(std::string_view text, std::string_view separator) {
  Strings parts;
  for (size_t at = 0; at != std::string_view::npos;) {
    const auto end = text.find(separator, at);
    parts.emplace_back(text.substr(at, end - at));
    at = end == std::string_view::npos ? end : end + separator.size();
  }
  return parts;
}

bool is_number(const std::string& text) { return text.find_first_not_of("0123456789") == std::string::npos; }

// Parses the shapes of one operator. Each new letter is added to the letters of the operator.
class Shapes {
 public:
  Shapes(std::vector<Operator::Letter>& letters, const std::vector<Declaration::Limit>& limits)
      : letters_(letters), limits_(limits) {}

  std::vector<Pattern> patterns(const std::string& shapes) {
    std::vector<Pattern> all;
    for (const auto& shape : split(shapes, " or ")) {
      Pattern pattern;
      for (const auto& size : split(std::string_view(shape).substr(1, shape.size() - 2), ", ")) {
        if (size == "...") {
          pattern.leading = true;
        } else {
          pattern.dimensions.push_back(dimension(size));
        }
      }
      all.push_back(std::move(pattern));
    }
    return all;
  }

  int letter(const std::string& name) {
    const auto found = std::ranges::find(letters_, name, &Operator::Letter::name);
    if (found != letters_.end()) return int(found - letters_.begin());
    const auto limit = std::ranges::find(limits_, name, &Declaration::Limit::letter);
    const bool counts = name == "B" || name == "T" || name == "N";
    const auto most = std::numeric_limits<int64_t>::max();
    letters_.push_back(limit != limits_.end() ? Operator::Letter{name, limit->least, limit->most}
                                              : Operator::Letter{name, counts ? 0 : 1, most});
    return int(letters_.size()) - 1;
  }

 private:
  Dimension dimension(const std::string& text) {
    if (is_number(text)) return {.plus = std::stoll(text)};
    if (const auto factors = split(text, " * "); factors.size() == 2) {
      return {.letter = letter(factors[0]), .times = letter(factors[1])};
    }
    const auto terms = split(text, " - ");
    return {.letter = letter(terms[0]), .plus = terms.size() == 2 ? -std::stoll(terms[1]) : 0};
  }

  std::vector<Operator::Letter>& letters_;
  const std::vector<Declaration::Limit>& limits_;
};

// "int? chunk=None" -> type "int?", name "chunk", default "None"
Option read(const OptionDeclaration& from) {
  const auto space = from.declaration.find(' '), equals = from.declaration.find('=');
  return {.declaration = from.declaration,
          .type = from.declaration.substr(0, space),
          .name = from.declaration.substr(space + 1, equals - space - 1),
          .otherwise = equals == std::string::npos ? "" : from.declaration.substr(equals + 1),
          .words = from.words,
          .least = from.least,
          .most = from.most};
}

// "a, b" and "c, d" -> "(a, b, *, c, d)"
std::string arguments(const Strings& positional, const Strings& keywords) {
  return "(" + join(positional) + (keywords.empty() ? "" : ", *, " + join(keywords)) + ")";
}

Strings declarations(const std::vector<Option>& options) {
  Strings all;
  for (const auto& option : options) all.push_back(option.declaration);
  return all;
}

// Data as declared; state and packing are always optional.
Strings inputs_of(const Operator& op, bool defaults) {
  Strings all;
  for (size_t i = 0; i < op.tensors.size(); ++i) {
    const auto& tensor = op.tensors[i];
    const bool optional = tensor.optional || i >= op.data;
    all.push_back((optional ? "Tensor? " : "Tensor ") + tensor.name + (optional && defaults ? "=None" : ""));
  }
  if (!op.packing.empty()) all.push_back("Tensor? " + op.packing + (defaults ? "=None" : ""));
  return all;
}

Strings outputs_of(const Operator& op) {
  Strings all{"Tensor " + op.output.name};
  for (size_t i = op.data; i < op.tensors.size(); ++i)
    all.push_back((op.tensors[i].optional ? "Tensor? " : "Tensor ") + op.tensors[i].name);
  return all;
}

std::string returns(const Strings& types) {
  return " -> " + (types.size() == 1 ? types[0] : "(" + join(types) + ")");
}

nlohmann::ordered_json default_of(const Option& option) {
  const auto& text = option.otherwise;
  if (text == "None") return nullptr;
  if (option.type.starts_with("str")) return text.substr(1, text.size() - 2);
  if (option.type.starts_with("bool")) return text == "True";
  if (option.type.starts_with("int")) return std::stoll(text);
  return std::stod(text);
}

const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::data:
      return "data";
    case Kind::floating:
      return "floating";
    case Kind::state:
      return "state";
    case Kind::position:
      return "position";
  }
  return "";
}

}  // namespace

Operator::Operator(const Declaration& from)
    : name(from.name), packing(from.packing), data(from.data.size()), output(from.output), saved(from.saved) {
  Shapes shapes(letters, from.limits);
  const auto add = [&](const TensorDeclaration& tensor, const char* prefix, Kind kind) {
    const auto own = tensor.declaration.substr(tensor.declaration.find(' ') + 1);
    tensors.push_back({.name = prefix + own,
                       .optional = tensor.declaration.starts_with("Tensor?"),
                       .shapes = tensor.shapes,
                       .patterns = shapes.patterns(tensor.shapes),
                       .kind = tensor.kind.value_or(kind)});
  };
  for (const auto& tensor : from.data) add(tensor, "", Kind::data);
  for (const auto& tensor : from.state) add(tensor, "state_", Kind::state);
  shapes.letter("N");
  for (const auto& option : from.options) options.push_back(read(option));
}

const Option& Operator::option(std::string_view wanted) const {
  const auto found = std::ranges::find(options, wanted, &Option::name);
  TORCH_INTERNAL_ASSERT(found != options.end(), name, " has no option ", wanted);
  return *found;
}

int Operator::letter(std::string_view wanted) const {
  const auto found = std::ranges::find(letters, wanted, &Letter::name);
  TORCH_INTERNAL_ASSERT(found != letters.end(), "no shape of ", name, " has ", wanted);
  return int(found - letters.begin());
}

std::string Operator::schema() const {
  return name + arguments(inputs_of(*this, true), declarations(options)) + returns(outputs_of(*this));
}

std::string Operator::forward_schema() const {
  auto keywords = declarations(options);
  keywords.push_back("bool save");
  auto results = outputs_of(*this);
  for (const auto& kept : saved) {
    if (kept.name != output.name) results.push_back("Tensor " + kept.name);
  }
  return name + "_forward" + arguments(inputs_of(*this, false), keywords) + returns(results);
}

std::string Operator::backward_schema() const {
  Strings positional, results;
  positional.push_back("Tensor? grad_" + output.name);
  for (size_t i = data; i < tensors.size(); ++i) {
    positional.push_back("Tensor? grad_" + tensors[i].name);
  }
  for (const auto& input : inputs_of(*this, false)) {
    positional.push_back(input);
    const auto space = input.find(' ');
    results.push_back(input.substr(0, space) + " grad_in_" + input.substr(space + 1));
  }
  for (const auto& kept : saved) positional.push_back("Tensor " + kept.name);
  return name + "_backward" + arguments(positional, declarations(options)) + returns(results);
}

std::string Operator::step_schema() const {
  Strings positional;
  char alias = 'a';
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto written = i < data ? "" : std::string("(") + alias++ + "!)";
    positional.push_back("Tensor" + written + (tensors[i].optional ? "? " : " ") + tensors[i].name);
  }
  return name + "_step" + arguments(positional, declarations(options)) + " -> Tensor " + output.name;
}

std::string Operator::explain_schema() const {
  auto keywords = declarations(options);
  keywords.insert(keywords.end(), {"str device", "bool step"});
  return name + "_explain" + arguments(inputs_of(*this, true), keywords) + " -> (str path, str why)";
}

const Operator& describe(std::string_view name) {
  for (const auto& op : operators()) {
    if (op.name == name) return op;
  }
  TORCH_CHECK_VALUE(false, "girih: no operator is named ", name);
}

std::string description() {
  using nlohmann::ordered_json;
  ordered_json all;
  for (const auto& op : operators()) {
    ordered_json tensors = ordered_json::array(), options = ordered_json::array(), sizes;
    for (size_t i = 0; i < op.tensors.size(); ++i) {
      const auto& tensor = op.tensors[i];
      tensors.push_back({{"name", tensor.name},
                         {"state", i >= op.data},
                         {"optional", tensor.optional},
                         {"shapes", tensor.shapes},
                         {"kind", name_of(tensor.kind)}});
    }
    for (const auto& option : op.options) {
      ordered_json entry = {{"name", option.name}, {"type", option.type}};
      if (!option.otherwise.empty()) entry["default"] = default_of(option);
      if (!option.words.empty()) entry["words"] = option.words;
      if (option.least > std::numeric_limits<double>::lowest()) entry["least"] = option.least;
      if (option.most < std::numeric_limits<double>::max()) entry["most"] = option.most;
      options.push_back(std::move(entry));
    }
    for (const auto& letter : op.letters) {
      sizes[letter.name] = {{"least", letter.least}};
      if (letter.most < std::numeric_limits<int64_t>::max()) sizes[letter.name]["most"] = letter.most;
    }
    const auto result = [](const Declaration::Result& from) {
      return ordered_json{{"name", from.name}, {"shapes", from.shapes}};
    };
    all[op.name] = {{"tensors", tensors},
                    {"options", options},
                    {"sizes", sizes},
                    {"output", result(op.output)},
                    {"saved", ordered_json::array()}};
    for (const auto& kept : op.saved) all[op.name]["saved"].push_back(result(kept));
    if (!op.packing.empty()) all[op.name]["packing"] = op.packing;
  }
  return all.dump();
}

}  // namespace girih
