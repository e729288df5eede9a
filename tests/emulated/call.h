// Common to the files of all operators: tensors that the Python tests pass, buffers between kernels, and the
// check of launches.
#pragma once

#include <algorithm>
#include <vector>

#include "emulator.h"
#include "tile/workspace.h"

struct Array {
  void* data;
  int dtype;
  int64_t stride[4];
};

template <template <int> class Tensor, int Rank>
Tensor<Rank> to_tensor(const Array& array) {
  Tensor<Rank> result;
  result.data = array.data;
  result.dtype = static_cast<girih::kernels::DType>(array.dtype);
  std::copy(array.stride, array.stride + Rank, result.stride);
  return result;
}
using girih::kernels::as_input;

template <int Rank>
girih::kernels::InputTensor<Rank> as_input(const Array& array) {
  return to_tensor<girih::kernels::InputTensor, Rank>(array);
}
template <int Rank>
girih::kernels::OutputTensor<Rank> as_output(const Array& array) {
  return to_tensor<girih::kernels::OutputTensor, Rank>(array);
}

inline void check_launch(cudaError_t error) {
  if (error != cudaSuccess) emulated::fail("a launch returns an error");
}

// The workspace of a plan, initialized with NaN. A gap follows every row; the pitch of a single row contains
// no gap. The destructor checks that the gaps are still NaN. A protected page follows the last gap.
class Buffers : public girih::kernels::Workspace {
  struct Buffer {
    unsigned char *pages, *begin;
    int64_t size, row_bytes, pitch;  // in bytes
  };
  static constexpr int64_t kPage = 4096;
  std::vector<Buffer> buffers_;

 public:
  static constexpr int64_t kGap = 32;  // in bytes

  Buffers() = default;
  Buffers(const Buffers&) = delete;
  ~Buffers() override {
    for (const Buffer& buffer : buffers_) {
      const int64_t rows = (buffer.size - kGap) / std::max<int64_t>(buffer.pitch, 1);
      for (int64_t offset = 0; offset < buffer.size; ++offset) {
        const bool is_gap = offset >= rows * buffer.pitch || offset % buffer.pitch >= buffer.row_bytes;
        if (is_gap && buffer.begin[offset] != 0xff)
          emulated::fail("a kernel writes beyond the rows of a buffer");
      }
      munmap(buffer.pages, (buffer.begin + buffer.size - buffer.pages + kPage - 1) / kPage * kPage + kPage);
    }
  }

 protected:
  void* allocate(int64_t rows, int64_t row_bytes, int64_t& pitch) override {
    if (rows > 1) pitch += kGap;
    const int64_t size = rows * pitch + kGap, used = (size + 15) / 16 * 16,
                  all = (used + kPage - 1) / kPage * kPage;
    auto* const pages = static_cast<unsigned char*>(
        mmap(nullptr, all + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (pages == MAP_FAILED || mprotect(pages + all, kPage, PROT_NONE) != 0) emulated::fail("no memory");
    std::memset(pages, 0xff, all);
    buffers_.push_back({pages, pages + all - used, size, row_bytes, pitch});
    return buffers_.back().begin;
  }
};
