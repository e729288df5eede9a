#include "operator.h"

#include <c10/util/Exception.h>

namespace girih {
namespace {

using Strings = std::vector<std::string>;

bool is_optional(const std::string& argument) { return argument.starts_with("Tensor?"); }
std::string name_of(const std::string& argument) { return argument.substr(argument.find(' ') + 1); }

std::string join(const Strings& parts) {
  std::string text;
  for (const auto& part : parts) text += (text.empty() ? "" : ", ") + part;
  return text;
}

// "a, b" and "c, d" -> "a, b, *, c, d"
std::string arguments(const Strings& positional, const Strings& keywords) {
  return "(" + join(positional) + (keywords.empty() ? "" : ", *, " + join(keywords)) + ")";
}

Strings inputs_of(const Operator& op, bool defaults) {
  const std::string none = defaults ? "=None" : "";
  Strings all;
  for (const auto& a : op.data) all.push_back(is_optional(a) ? a + none : a);
  for (const auto& a : op.state) all.push_back("Tensor? state_" + name_of(a) + none);
  if (!op.packing.empty()) all.push_back("Tensor? " + op.packing + none);
  return all;
}

Strings outputs_of(const Operator& op) {
  Strings all{"Tensor " + op.output};
  for (const auto& a : op.state)
    all.push_back((is_optional(a) ? "Tensor? state_" : "Tensor state_") + name_of(a));
  return all;
}

std::string returns(const Strings& types) { return types.size() == 1 ? types[0] : "(" + join(types) + ")"; }

}  // namespace

std::string Operator::schema() const {
  return name + arguments(inputs_of(*this, true), options) + " -> " + returns(outputs_of(*this));
}

std::string Operator::forward_schema() const {
  auto keywords = options;
  keywords.push_back("bool save");
  auto results = outputs_of(*this);
  results.insert(results.end(), saved.begin(), saved.end());
  return name + "_forward" + arguments(inputs_of(*this, false), keywords) + " -> " + returns(results);
}

std::string Operator::backward_schema() const {
  Strings positional, results;
  for (const auto& a : outputs_of(*this)) positional.push_back("Tensor? grad_" + name_of(a));
  for (const auto& a : inputs_of(*this, false)) {
    positional.push_back(a);
    results.push_back("Tensor? grad_in_" + name_of(a));
  }
  positional.insert(positional.end(), saved.begin(), saved.end());
  return name + "_backward" + arguments(positional, options) + " -> " + returns(results);
}

std::string Operator::step_schema() const {
  Strings positional = data;
  char alias = 'a';
  for (const auto& a : state) {
    positional.push_back(std::string("Tensor(") + alias++ + "!)" + (is_optional(a) ? "? " : " ") + "state_" +
                         name_of(a));
  }
  return name + "_step" + arguments(positional, options) + " -> Tensor " + output;
}

const Operator& describe(std::string_view registered_name) {
  std::string_view name = registered_name.substr(registered_name.find("::") + 2);
  for (std::string_view suffix : {"_forward", "_backward", "_step"}) {
    if (name.ends_with(suffix)) name.remove_suffix(suffix.size());
  }
  for (const auto& op : operators()) {
    if (op.name == name) return op;
  }
  TORCH_CHECK(false, "girih: no operator is named ", name);
}

}  // namespace girih
