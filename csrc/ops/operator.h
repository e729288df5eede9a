// What an operator is to the dispatcher: one description, from which its four schemas and everything that is
// the same for all operators (autograd, autocast, step) follow.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace girih {

// Arguments are written as in a schema: "Tensor q", "Tensor? g", "float? scale=None".
//
//   X         (data, state, packing, *, options)             -> (output, state)          what users call
//   X_forward (data, state, packing, *, options, bool save)  -> (output, state, saved)   CPU, CUDA, Meta
//   X_backward(grad of each output, data, state, packing, saved, *, options)
//                                                        -> one gradient a tensor input
//   X_step    (data, state in place, *, options)             -> output                   one token
struct Operator {
  std::string name;
  std::vector<std::string> data;
  std::vector<std::string> state = {};    // "Tensor k": always returned; "Tensor? z": may be absent
  std::string packing = {};               // "cu_seqlens", "cu_chunks": where packed sequences start
  std::vector<std::string> options = {};  // never tensors
  std::string output = "o";
  std::vector<std::string> saved = {};  // "Tensor lse": what forward keeps for backward beyond its inputs
  std::vector<std::string> low = {};    // inputs that autocast sends down; all others go to fp32

  size_t inputs() const { return data.size() + state.size() + (packing.empty() ? 0 : 1); }
  size_t outputs() const { return 1 + state.size(); }

  std::string schema() const;
  std::string forward_schema() const;
  std::string backward_schema() const;
  std::string step_schema() const;
};

// Every operator of the library, in schema.cpp.
const std::vector<Operator>& operators();

// The description of a registered name: "girih::gsa_forward" -> gsa.
const Operator& describe(std::string_view registered_name);

}  // namespace girih
