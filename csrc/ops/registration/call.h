// Functions of the dispatcher from functions of the Call of an operator.
//
// The Call of an operator X is a struct whose members are the arguments of X. Its list of arguments is
// written once, in `arguments`; the signatures of X_forward, X_backward, X_step and X_explain follow from it:
//
//   struct Call {
//     static constexpr const char* name = "gla";
//     static constexpr size_t data_count = 4;    // q, k, v, g
//     // The state as X_step passes it: OptionalTensor for tensors that may be absent.
//     using StepState = Types<Tensor>;
//     // All members, in the order of the schema of X: data, state, packing, options.
//     static auto arguments(auto& c) {
//       return std::tie(c.q, c.k, c.v, c.g, c.state_s, c.cu_seqlens, c.scale);
//     }
//     ...
//   };
//
// The gradients of the outputs and the saved tensors are structs with `arguments` too, in the order of the
// schema of X_backward.
#pragma once

#include <functional>
#include <tuple>

#include "../arguments/path.h"
#include "dispatch.h"

namespace girih {

template <class... T>
struct Types {
  static constexpr size_t count = sizeof...(T);
};

// Tensors are passed by reference, options by value.
template <class T>
using Parameter =
    std::conditional_t<std::is_same_v<T, Tensor> || std::is_same_v<T, OptionalTensor>, const T&, T>;

template <class Struct>
using Members = decltype(Struct::arguments(std::declval<Struct&>()));

// The types of `count` members from number `begin` on.
template <class Struct, size_t begin, size_t... i>
auto member_types(std::index_sequence<i...>)
    -> Types<std::remove_reference_t<std::tuple_element_t<begin + i, Members<Struct>>>...>;
template <class Struct, size_t begin, size_t count>
using MemberTypes = decltype(member_types<Struct, begin>(std::make_index_sequence<count>()));
template <class Struct>
using AllTypes = MemberTypes<Struct, 0, std::tuple_size_v<Members<Struct>>>;

template <class Call>
constexpr size_t kInputCount = Call::data_count + Call::StepState::count + 1;  // data, state, packing
template <class Call>
using DataTypes = MemberTypes<Call, 0, Call::data_count>;
template <class Call>
using InputTypes = MemberTypes<Call, 0, kInputCount<Call>>;
template <class Call>
using OptionTypes =
    MemberTypes<Call, kInputCount<Call>, std::tuple_size_v<Members<Call>> - kInputCount<Call>>;

template <class Result, class... Lists>
struct SignatureOf;
template <class Result, class... T>
struct SignatureOf<Result, Types<T...>> {
  using type = Result(Parameter<T>...);
};
template <class Result, class... T, class... U, class... Lists>
struct SignatureOf<Result, Types<T...>, Types<U...>, Lists...>
    : SignatureOf<Result, Types<T..., U...>, Lists...> {};

// The C++ signatures of X and of X_step.
template <class Call, class Result>
using Signature = typename SignatureOf<Result, AllTypes<Call>>::type;
template <class Call>
using StepSignature =
    typename SignatureOf<Tensor, DataTypes<Call>, typename Call::StepState, OptionTypes<Call>>::type;

template <class Struct, class... T>
Struct fill(const T&... values) {
  Struct filled{};
  Struct::arguments(filled) = std::tie(values...);
  return filled;
}

// Checks the call against the declaration of its operator.
template <class Call>
Sizes check_declaration(const Call& call) {
  static const auto& op = get_operator(Call::name);
  return std::apply([](const auto&... arguments) { return check(op, {Argument(arguments)...}); },
                    Call::arguments(call));
}

// ---- typed functions: each returns a pointer to a function with the arguments of the schema ---------------

// X_forward or X_explain from function(call, extra...).
template <auto function, class Result, class Call, class... T, class... Extra>
auto unpack(Result (*)(const Call&, Extra...), Types<T...>) {
  return +[](Parameter<T>... arguments, Extra... extra) -> Result {
    return function(fill<Call>(arguments...), extra...);
  };
}
template <auto function, class Result, class Call, class... Extra>
auto unpack_call(Result (*pointer)(const Call&, Extra...)) {
  return unpack<function>(pointer, AllTypes<Call>());
}

// X_backward from function(call, gradients, saved), which returns nullopt on the ATen path: then
// X_backward is redispatched with kAtenKey.
template <auto function, class Result, class Call, class Gradients, class Saved, class... Gradient,
          class... Input, class... SavedTensor, class... Option>
auto unpack_backward(std::optional<Result> (*)(const Call&, const Gradients&, const Saved&),
                     Types<Gradient...>, Types<Input...>, Types<SavedTensor...>, Types<Option...>) {
  return +[](Parameter<Gradient>... gradients, Parameter<Input>... inputs, Parameter<SavedTensor>... saved,
             Parameter<Option>... options) -> Result {
    auto result =
        function(fill<Call>(inputs..., options...), fill<Gradients>(gradients...), fill<Saved>(saved...));
    if (result) return *std::move(result);
    using Signature =
        Result(Parameter<Gradient>..., Parameter<Input>..., Parameter<SavedTensor>..., Parameter<Option>...);
    static const auto op = find_operator(std::string(Call::name) + "_backward").typed<Signature>();
    return op.redispatch(kAtenKey, gradients..., inputs..., saved..., options...);
  };
}

// X_step from function(call), which returns nullopt on the ATen path. The packing is absent.
template <auto function, class Call, class... Data, class... State, class... Option>
auto unpack_step(std::optional<Tensor> (*)(const Call&), Types<Data...>, Types<State...>, Types<Option...>) {
  return +[](Parameter<Data>... data, Parameter<State>... state, Parameter<Option>... options) -> Tensor {
    const auto call = fill<Call>(data..., state..., OptionalTensor(), options...);
    check_step(get_operator(Call::name), std::get<0>(Call::arguments(call)), {Argument(state)...});
    if (auto result = function(call)) return *std::move(result);
    using Signature = Tensor(Parameter<Data>..., Parameter<State>..., Parameter<Option>...);
    static const auto op = find_operator(std::string(Call::name) + "_step").typed<Signature>();
    return op.redispatch(kAtenKey, data..., state..., options...);
  };
}

// ---- registration -----------------------------------------------------------------------------------------

template <class Result, class Call, class... Extra>
std::string name_of(Result (*)(const Call&, Extra...)) {
  return Call::name;
}

template <auto forward>
void register_forward(torch::Library& m) {
  m.impl((name_of(forward) + "_forward").c_str(), unpack_call<forward>(forward));
}

template <auto backward, class Result, class Call, class Gradients, class Saved>
void register_backward(torch::Library& m,
                       std::optional<Result> (*pointer)(const Call&, const Gradients&, const Saved&)) {
  m.impl((std::string(Call::name) + "_backward").c_str(),
         unpack_backward<backward>(pointer, AllTypes<Gradients>(), InputTypes<Call>(), AllTypes<Saved>(),
                                   OptionTypes<Call>()));
}
template <auto backward>
void register_backward(torch::Library& m) {
  register_backward<backward>(m, backward);
}

template <auto step, class Call>
void register_step(torch::Library& m, std::optional<Tensor> (*pointer)(const Call&)) {
  m.impl((std::string(Call::name) + "_step").c_str(),
         unpack_step<step>(pointer, DataTypes<Call>(), typename Call::StepState(), OptionTypes<Call>()));
}
template <auto step>
void register_step(torch::Library& m) {
  register_step<step>(m, step);
}

// X_explain. choose_path(problem, call): on CUDA with the limits of the device, elsewhere Problem::path.
template <class Call, class Problem, auto choose_path>
Explanation explain(const Call& call, std::string_view device, bool step) {
  const auto problem = Problem::check(call);
  if constexpr (requires { problem.step_path(call); }) {
    if (step) return explain_path(problem.step_path(call), device);
  }
  if constexpr (requires { problem.N; }) {
    if (problem.N == 0) return explain_path(aten(kNoSequences), device);
  }
  return explain_path(std::invoke(choose_path, problem, call), device);
}
template <class Call, class Problem, auto choose_path>
void register_explain(torch::Library& m) {
  constexpr auto function = &explain<Call, Problem, choose_path>;
  m.impl((std::string(Call::name) + "_explain").c_str(), unpack_call<function>(function));
}

}  // namespace girih
