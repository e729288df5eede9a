// Which code a call takes. Every operator that has kernels decides it in one function of sizes, dtypes and
// options, in its problem.h: CUDA runs what it says, Meta and the CPU size by it what backward is given, and
// girih.ops.explain tells it.
#pragma once

#include <string>
#include <string_view>
#include <tuple>

#include "check.h"

namespace girih {

struct Path {
  enum class Code { tensor_cores, exact, aten } code;
  const char* why;  // why this one and no faster one

  bool operator==(Code other) const { return code == other; }
};

constexpr Path tensor_cores(const char* why = "16-bit products, sums and states in fp32") {
  return {Path::Code::tensor_cores, why};
}
constexpr Path exact(const char* why) { return {Path::Code::exact, why}; }
constexpr Path aten(const char* why) { return {Path::Code::aten, why}; }

constexpr const char* kFloat64 = "float64 has no kernels";
constexpr const char* kFloat32 = "float32 is computed in fp32, without tf32";
constexpr const char* kSplitFloat32 = "products of fp32, each as three of tf32, sums in fp32";
constexpr const char* kNoSequence = "there is no sequence to read";
constexpr const char* kSmallCard = "this card has too little shared memory for the kernels of these widths";
constexpr const char* kMemoryBound = "one pass over memory: there is no product for the tensor cores";

// What X_explain returns: the path on `device`.
using Explanation = std::tuple<std::string, std::string>;

inline Explanation explained(const Path& path, std::string_view device) {
  GIRIH_CHECK(device == "cuda" || device == "cpu", "explain: device is '", device,
              "' but should be cuda or cpu");
  if (device == "cpu") return {"aten", "the CPU runs every operator as a chain of PyTorch's"};
  const char* names[] = {"tensor cores", "exact fp32", "aten"};
  return {names[int(path.code)], path.why};
}

}  // namespace girih
