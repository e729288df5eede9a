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
  enum class Code { tensor_cores, fp32, aten } code;
  const char* reason;  // for explain: what excludes a faster path

  bool operator==(Code other) const { return code == other; }
};

constexpr Path tensor_cores(const char* reason = "16-bit products, sums and states in fp32") {
  return {Path::Code::tensor_cores, reason};
}
constexpr Path fp32(const char* reason) { return {Path::Code::fp32, reason}; }
constexpr Path aten(const char* reason) { return {Path::Code::aten, reason}; }

constexpr const char* kNoFloat64Kernels = "float64 has no kernels";
constexpr const char* kFloat32Reason = "float32 is computed in fp32, without tf32";
constexpr const char* k3xTF32 = "each fp32 product is computed by three tf32 products, sums in fp32";
constexpr const char* kNoSequences = "the call has no sequences";
constexpr const char* kSharedMemoryTooSmall =
    "the shared memory of this device is too small for the kernels of these widths";
constexpr const char* kMemoryBound = "memory-bound: no products for the tensor cores";

// The result of X_explain: the path on `device` and the reason.
using Explanation = std::tuple<std::string, std::string>;

inline Explanation explain_path(const Path& path, std::string_view device) {
  GIRIH_CHECK(device == "cuda" || device == "cpu", "explain: device is '", device,
              "' but should be cuda or cpu");
  if (device == "cpu") return {"aten", "the CPU runs all operators by PyTorch's operators"};
  const char* names[] = {"tensor cores", "fp32", "aten"};
  return {names[int(path.code)], path.reason};
}

}  // namespace girih
