// The gates of rows by name.
#pragma once

#include <c10/util/Exception.h>

#include <string_view>

#include "tile/row_gate.h"

namespace girih {

inline kernels::RowGate row_gate(const char* op, std::string_view name) {
  using kernels::RowGate;
  if (name == "none") return RowGate::none;
  if (name == "linear") return RowGate::linear;
  if (name == "sigmoid") return RowGate::sigmoid;
  if (name == "logsigmoid") return RowGate::logsigmoid;
  TORCH_CHECK(name == "decay", "girih: ", op, ": a gate is '", name,
              "'; expected none, linear, sigmoid, logsigmoid or decay");
  return RowGate::decay;
}

}  // namespace girih
