// Choice of the instance for a shape.
#pragma once

#include "gsa/gsa.h"
#include "tile/instance.h"

namespace girih::kernels {

// Calls launch(element, slots) with the smallest tile that holds M slots.
template <class Launch>
inline cudaError_t by_instance(const GsaShape& shape, const Launch& launch) {
  return by_short_element(shape.dtype, [&](auto element) {
    return by_width<64, kGsaMaxSlots>(shape.M, [&](auto slots) { return launch(element, slots); });
  });
}

}  // namespace girih::kernels
