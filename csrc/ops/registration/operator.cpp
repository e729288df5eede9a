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
  for (size_t begin = 0; begin != std::string_view::npos;) {
    const auto end = text.find(separator, begin);
    parts.emplace_back(text.substr(begin, end - begin));
    begin = end == std::string_view::npos ? end : end + separator.size();
  }
  return parts;
}

bool is_number(const std::string& text) { return text.find_first_not_of("0123456789") == std::string::npos; }

// Parses the shapes of one operator. Each new letter is added to the letters of the operator.
class ShapeParser {
 public:
  ShapeParser(std::vector<Operator::Letter>& letters, const std::vector<OperatorDeclaration::Limit>& limits)
      : letters_(letters), limits_(limits) {}

  std::vector<ShapePattern> patterns(const std::string& shapes) {
    std::vector<ShapePattern> all;
    for (const auto& shape : split(shapes, " or ")) {
      ShapePattern pattern;
      for (const auto& size : split(std::string_view(shape).substr(1, shape.size() - 2), ", ")) {
        if (size == "...") {
          pattern.has_ellipsis = true;
        } else {
          pattern.dimensions.push_back(dimension(size));
        }
      }
      all.push_back(std::move(pattern));
    }
    return all;
  }

  int letter(const std::string& name) {
    const auto it = std::ranges::find(letters_, name, &Operator::Letter::name);
    if (it != letters_.end()) return int(it - letters_.begin());
    const auto limit = std::ranges::find(limits_, name, &OperatorDeclaration::Limit::letter);
    const bool may_be_zero = name == "B" || name == "T" || name == "N";
    const auto most = std::numeric_limits<int64_t>::max();
    letters_.push_back(limit != limits_.end() ? Operator::Letter{name, limit->least, limit->most}
                                              : Operator::Letter{name, may_be_zero ? 0 : 1, most});
    return int(letters_.size()) - 1;
  }

 private:
  Dimension dimension(const std::string& text) {
    if (is_number(text)) return {.offset = std::stoll(text)};
    if (const auto factors = split(text, " * "); factors.size() == 2) {
      return {.letter = letter(factors[0]), .factor_letter = letter(factors[1])};
    }
    const auto terms = split(text, " - ");
    return {.letter = letter(terms[0]), .offset = terms.size() == 2 ? -std::stoll(terms[1]) : 0};
  }

  std::vector<Operator::Letter>& letters_;
  const std::vector<OperatorDeclaration::Limit>& limits_;
};

// "int? chunk=None" -> type "int?", name "chunk", default "None"
Option parse_option(const OptionDeclaration& from) {
  const auto space = from.declaration.find(' '), equals = from.declaration.find('=');
  return {.declaration = from.declaration,
          .type = from.declaration.substr(0, space),
          .name = from.declaration.substr(space + 1, equals - space - 1),
          .default_value = equals == std::string::npos ? "" : from.declaration.substr(equals + 1),
          .words = from.words,
          .least = from.least,
          .most = from.most};
}

// "a, b" and "c, d" -> "(a, b, *, c, d)"
std::string format_arguments(const Strings& positional, const Strings& keywords) {
  return "(" + join(positional) + (keywords.empty() ? "" : ", *, " + join(keywords)) + ")";
}

Strings option_declarations(const std::vector<Option>& options) {
  Strings all;
  for (const auto& option : options) all.push_back(option.declaration);
  return all;
}

// Data as declared; state and packing are always optional.
Strings input_declarations(const Operator& op, bool with_defaults) {
  Strings all;
  for (size_t i = 0; i < op.tensors.size(); ++i) {
    const auto& tensor = op.tensors[i];
    const bool optional = tensor.optional || i >= op.data_count;
    all.push_back((optional ? "Tensor? " : "Tensor ") + tensor.name +
                  (optional && with_defaults ? "=None" : ""));
  }
  if (!op.packing.empty()) all.push_back("Tensor? " + op.packing + (with_defaults ? "=None" : ""));
  return all;
}

Strings output_declarations(const Operator& op) {
  Strings all{"Tensor " + op.output.name};
  for (size_t i = op.data_count; i < op.tensors.size(); ++i)
    all.push_back((op.tensors[i].optional ? "Tensor? " : "Tensor ") + op.tensors[i].name);
  return all;
}

std::string format_returns(const Strings& types) {
  return " -> " + (types.size() == 1 ? types[0] : "(" + join(types) + ")");
}

nlohmann::ordered_json default_json(const Option& option) {
  const auto& text = option.default_value;
  if (text == "None") return nullptr;
  if (option.type.starts_with("str")) return text.substr(1, text.size() - 2);
  if (option.type.starts_with("bool")) return text == "True";
  if (option.type.starts_with("int")) return std::stoll(text);
  return std::stod(text);
}

const char* kind_name(TensorKind kind) {
  switch (kind) {
    case TensorKind::data:
      return "data";
    case TensorKind::floating:
      return "floating";
    case TensorKind::state:
      return "state";
    case TensorKind::position:
      return "position";
  }
  return "";
}

}  // namespace

Operator::Operator(const OperatorDeclaration& from)
    : name(from.name),
      packing(from.packing),
      data_count(from.data.size()),
      output(from.output),
      saved(from.saved) {
  ShapeParser shapes(letters, from.limits);
  const auto add = [&](const TensorDeclaration& tensor, const char* prefix, TensorKind kind) {
    const auto bare_name = tensor.declaration.substr(tensor.declaration.find(' ') + 1);
    tensors.push_back({.name = prefix + bare_name,
                       .optional = tensor.declaration.starts_with("Tensor?"),
                       .shapes = tensor.shapes,
                       .patterns = shapes.patterns(tensor.shapes),
                       .kind = tensor.kind.value_or(kind)});
  };
  for (const auto& tensor : from.data) add(tensor, "", TensorKind::data);
  for (const auto& tensor : from.state) add(tensor, "state_", TensorKind::state);
  shapes.letter("N");
  for (const auto& option : from.options) options.push_back(parse_option(option));
}

const Option& Operator::option(std::string_view key) const {
  const auto it = std::ranges::find(options, key, &Option::name);
  TORCH_INTERNAL_ASSERT(it != options.end(), name, " has no option ", key);
  return *it;
}

int Operator::letter(std::string_view key) const {
  const auto it = std::ranges::find(letters, key, &Letter::name);
  TORCH_INTERNAL_ASSERT(it != letters.end(), "no shape of ", name, " has ", key);
  return int(it - letters.begin());
}

std::string Operator::schema() const {
  return name + format_arguments(input_declarations(*this, true), option_declarations(options)) +
         format_returns(output_declarations(*this));
}

std::string Operator::forward_schema() const {
  auto keywords = option_declarations(options);
  keywords.push_back("bool save");
  auto results = output_declarations(*this);
  for (const auto& saved_result : saved) {
    if (saved_result.name != output.name) results.push_back("Tensor " + saved_result.name);
  }
  return name + "_forward" + format_arguments(input_declarations(*this, false), keywords) +
         format_returns(results);
}

std::string Operator::backward_schema() const {
  Strings positional, results;
  positional.push_back("Tensor? grad_" + output.name);
  for (size_t i = data_count; i < tensors.size(); ++i) {
    positional.push_back("Tensor? grad_" + tensors[i].name);
  }
  for (const auto& input : input_declarations(*this, false)) {
    positional.push_back(input);
    const auto space = input.find(' ');
    results.push_back(input.substr(0, space) + " grad_in_" + input.substr(space + 1));
  }
  for (const auto& saved_result : saved) positional.push_back("Tensor " + saved_result.name);
  return name + "_backward" + format_arguments(positional, option_declarations(options)) +
         format_returns(results);
}

std::string Operator::step_schema() const {
  Strings positional;
  char alias = 'a';
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto written = i < data_count ? "" : std::string("(") + alias++ + "!)";
    positional.push_back("Tensor" + written + (tensors[i].optional ? "? " : " ") + tensors[i].name);
  }
  return name + "_step" + format_arguments(positional, option_declarations(options)) + " -> Tensor " +
         output.name;
}

std::string Operator::explain_schema() const {
  auto keywords = option_declarations(options);
  keywords.insert(keywords.end(), {"str device", "bool step"});
  return name + "_explain" + format_arguments(input_declarations(*this, true), keywords) +
         " -> (str path, str why)";
}

const Operator& get_operator(std::string_view name) {
  for (const auto& op : operators()) {
    if (op.name == name) return op;
  }
  TORCH_CHECK_VALUE(false, "girih: no operator is named ", name);
}

std::string operators_json() {
  using nlohmann::ordered_json;
  ordered_json all;
  for (const auto& op : operators()) {
    ordered_json tensors = ordered_json::array(), options = ordered_json::array(), sizes;
    for (size_t i = 0; i < op.tensors.size(); ++i) {
      const auto& tensor = op.tensors[i];
      tensors.push_back({{"name", tensor.name},
                         {"state", i >= op.data_count},
                         {"optional", tensor.optional},
                         {"shapes", tensor.shapes},
                         {"kind", kind_name(tensor.kind)}});
    }
    for (const auto& option : op.options) {
      ordered_json entry = {{"name", option.name}, {"type", option.type}};
      if (!option.default_value.empty()) entry["default"] = default_json(option);
      if (!option.words.empty()) entry["words"] = option.words;
      if (option.least > std::numeric_limits<double>::lowest()) entry["least"] = option.least;
      if (option.most < std::numeric_limits<double>::max()) entry["most"] = option.most;
      options.push_back(std::move(entry));
    }
    for (const auto& letter : op.letters) {
      sizes[letter.name] = {{"least", letter.least}};
      if (letter.most < std::numeric_limits<int64_t>::max()) sizes[letter.name]["most"] = letter.most;
    }
    const auto result = [](const OperatorDeclaration::Result& from) {
      return ordered_json{{"name", from.name}, {"shapes", from.shapes}};
    };
    all[op.name] = {{"tensors", tensors},
                    {"options", options},
                    {"sizes", sizes},
                    {"output", result(op.output)},
                    {"saved", ordered_json::array()}};
    for (const auto& saved_result : op.saved) all[op.name]["saved"].push_back(result(saved_result));
    if (!op.packing.empty()) all[op.name]["packing"] = op.packing;
  }
  return all.dump();
}

}  // namespace girih
