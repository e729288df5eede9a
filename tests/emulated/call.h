// What the operators' files have in common: tensors as the Python tests describe them, and launches that may
// not fail.
#pragma once

#include <algorithm>
#include <vector>

#include "emulator.h"
#include "tile/array.h"

struct Array {
  void* data;
  int dtype;
  int64_t stride[4];
};

template <template <int> class Kind, int Rank>
Kind<Rank> as(const Array& array) {
  Kind<Rank> result;
  result.data = array.data;
  result.dtype = static_cast<girih::kernels::DType>(array.dtype);
  std::copy(array.stride, array.stride + Rank, result.stride);
  return result;
}
template <int Rank>
girih::kernels::InputTensor<Rank> in(const Array& array) {
  return as<girih::kernels::InputTensor, Rank>(array);
}
template <int Rank>
girih::kernels::OutputTensor<Rank> out(const Array& array) {
  return as<girih::kernels::OutputTensor, Rank>(array);
}

inline void must(cudaError_t error) {
  if (error != cudaSuccess) emulated::fail("a launch is refused");
}

// Arrays that kernels write for one another: all NaN before, and what lies between their rows, and behind the
// last, after as well. Behind that is a wall: who comes to it ends the test.
class Rooms {
  struct Room {
    unsigned char *pages, *begin;
    int64_t size, row, pitch;  // bytes
  };
  static constexpr int64_t kPage = 4096;
  std::vector<Room> rooms_;

  void* make(int64_t rows, int64_t row, int64_t gap) {
    const int64_t size = rows * (row + gap) + kGap, used = (size + 15) / 16 * 16,
                  all = (used + kPage - 1) / kPage * kPage;
    auto* const pages = static_cast<unsigned char*>(
        mmap(nullptr, all + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (pages == MAP_FAILED || mprotect(pages + all, kPage, PROT_NONE) != 0) emulated::fail("no memory");
    std::memset(pages, 0xff, all);
    rooms_.push_back({pages, pages + all - used, size, row, row + gap});
    return rooms_.back().begin;
  }

 public:
  static constexpr int64_t kGap = 32;  // bytes

  // A row is as long as the last of the sizes.
  template <class... Size>
  girih::kernels::OutputTensor<sizeof...(Size)> operator()(girih::kernels::DType dtype, Size... sizes) {
    constexpr int kRank = sizeof...(Size);
    const int64_t size[kRank] = {static_cast<int64_t>(sizes)...};
    const int64_t element = dtype == girih::kernels::DType::f32 ? 4 : 2;
    girih::kernels::OutputTensor<kRank> array{nullptr, dtype, {}};
    array.stride[kRank - 1] = 1;
    int64_t rows = 1;
    for (int d = kRank - 2; d >= 0; --d) {
      array.stride[d] = rows * (size[kRank - 1] + kGap / element);
      rows *= size[d];
    }
    array.data = make(rows, size[kRank - 1] * element, kGap);
    return array;
  }
  void* bytes(int64_t count) { return make(1, count, 0); }

  Rooms() = default;
  Rooms(const Rooms&) = delete;
  ~Rooms() {
    for (const Room& room : rooms_) {
      const int64_t rows = (room.size - kGap) / std::max<int64_t>(room.pitch, 1);
      for (int64_t at = 0; at < room.size; ++at) {
        const bool outside = at >= rows * room.pitch || at % room.pitch >= room.row;
        if (outside && room.begin[at] != 0xff) emulated::fail("a kernel writes beyond an array's rows");
      }
      munmap(room.pages, (room.begin + room.size - room.pages + kPage - 1) / kPage * kPage + kPage);
    }
  }
};

// What one kernel has written as another reads it.
template <int Rank>
girih::kernels::InputTensor<Rank> written(const girih::kernels::OutputTensor<Rank>& array) {
  girih::kernels::InputTensor<Rank> result{array.data, array.dtype, {}};
  std::copy(array.stride, array.stride + Rank, result.stride);
  return result;
}
