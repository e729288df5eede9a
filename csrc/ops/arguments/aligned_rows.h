// Rows aligned for 16-byte copies of the kernels.
#pragma once

#include <ATen/ATen.h>

namespace girih {

// x [..., width] with rows that start at multiples of 16 bytes and are zero-padded to a multiple of
// `multiple` elements; x itself if it already is.
inline at::Tensor in_packs(const at::Tensor& x, int64_t multiple = 8) {
  const int64_t width = x.size(-1), pack = 16 / x.element_size();
  bool fits =
      width % multiple == 0 && x.stride(-1) == 1 && reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) fits = fits && (x.size(d) == 1 || x.stride(d) % pack == 0);
  if (fits) return x;
  // constant_pad_nd preserves the memory format of the input, such as channels last.
  return at::constant_pad_nd(x, {0, (multiple - width % multiple) % multiple}).contiguous();
}

// The first `width` columns, contiguous.
inline at::Tensor without_packs(const at::Tensor& x, int64_t width) {
  return x.size(-1) == width ? x : x.narrow(-1, 0, width).contiguous();
}

}  // namespace girih
