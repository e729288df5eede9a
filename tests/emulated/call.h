// What the operators' files have in common: tensors as the Python tests describe them, and launches that may
// not fail.
#pragma once

#include <algorithm>
#include <deque>
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
girih::kernels::In<Rank> in(const Array& array) {
  return as<girih::kernels::In, Rank>(array);
}
template <int Rank>
girih::kernels::Out<Rank> out(const Array& array) {
  return as<girih::kernels::Out, Rank>(array);
}

inline void must(cudaError_t error) {
  if (error != cudaSuccess) emulated::fail("a launch is refused");
}

// Arrays that kernels write for one another: all NaN before, and what lies between their rows, and behind the
// last, after as well.
class Rooms {
  struct Room {
    std::vector<unsigned char> bytes;
    int64_t row, pitch;  // bytes
  };
  std::deque<Room> rooms_;

  void* make(int64_t rows, int64_t row, int64_t gap) {
    rooms_.push_back({std::vector<unsigned char>(rows * (row + gap) + kGap, 0xff), row, row + gap});
    return rooms_.back().bytes.data();
  }

 public:
  static constexpr int64_t kGap = 32;  // bytes

  // A row is as long as the last of the sizes.
  template <class... Size>
  girih::kernels::Out<sizeof...(Size)> operator()(girih::kernels::DType dtype, Size... sizes) {
    constexpr int kRank = sizeof...(Size);
    const int64_t size[kRank] = {static_cast<int64_t>(sizes)...};
    const int64_t element = dtype == girih::kernels::DType::f32 ? 4 : 2;
    girih::kernels::Out<kRank> array{nullptr, dtype, {}};
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
      const int64_t rows = (room.bytes.size() - kGap) / std::max<int64_t>(room.pitch, 1);
      for (int64_t at = 0; at < static_cast<int64_t>(room.bytes.size()); ++at) {
        const bool outside = at >= rows * room.pitch || at % room.pitch >= room.row;
        if (outside && room.bytes[at] != 0xff) emulated::fail("a kernel writes beyond an array's rows");
      }
    }
  }
};

// What one kernel has written as another reads it.
template <int Rank>
girih::kernels::In<Rank> written(const girih::kernels::Out<Rank>& array) {
  girih::kernels::In<Rank> result{array.data, array.dtype, {}};
  std::copy(array.stride, array.stride + Rank, result.stride);
  return result;
}
