// The instance that serves a shape.
#pragma once

#include "gsa/gsa.h"
#include "tile/instance.h"

namespace girih::kernels {

// launch(an element, slots of a tile): the smallest tile that holds M.
template <class Launch>
inline cudaError_t by_instance(const GsaShape& shape, const Launch& launch) {
  return by_short_element(shape.dtype, [&](auto element) {
    return by_width<64, kGsaMaxSlots>(shape.M, [&](auto slots) { return launch(element, slots); });
  });
}

}  // namespace girih::kernels
