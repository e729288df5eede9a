// The path of a call: tensor cores, fp32 kernels or PyTorch's operators. The problem.h of each operator
// chooses it from sizes, dtypes and options. CUDA runs this path, Meta and the CPU size the saved tensors by
// it, and girih.ops.explain returns it.
#pragma once

#include <string>
#include <string_view>
#include <tuple>

#include "check.h"

namespace girih {

struct Path {
  enum class Code { tensor_cores, exact, aten } code;
  const char* why;  // for explain: what excludes a faster path

  bool operator==(Code other) const { return code == other; }
};

constexpr Path tensor_cores(const char* why = "16-bit products, sums and states in fp32") {
  return {Path::Code::tensor_cores, why};
}
constexpr Path exact(const char* why) { return {Path::Code::exact, why}; }
constexpr Path aten(const char* why) { return {Path::Code::aten, why}; }

constexpr const char* kFloat64 = "float64 has no kernels";
constexpr const char* kFloat32 = "float32 is computed in fp32, without tf32";
constexpr const char* kSplitFloat32 = "each fp32 product is computed by three tf32 products, sums in fp32";
constexpr const char* kNoSequence = "the call has no sequences";
constexpr const char* kSmallCard =
    "the shared memory of this device is too small for the kernels of these widths";
constexpr const char* kMemoryBound = "memory-bound: no products for the tensor cores";

// The result of X_explain: the path on `device` and the reason.
using Explanation = std::tuple<std::string, std::string>;

inline Explanation explained(const Path& path, std::string_view device) {
  GIRIH_CHECK(device == "cuda" || device == "cpu", "explain: device is '", device,
              "' but should be cuda or cpu");
  if (device == "cpu") return {"aten", "the CPU runs all operators by PyTorch's operators"};
  const char* names[] = {"tensor cores", "exact fp32", "aten"};
  return {names[int(path.code)], path.why};
}

}  // namespace girih
