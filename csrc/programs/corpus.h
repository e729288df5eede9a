// Bytes of text to train on: the split and the windows of girih.data in Python.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <string>

namespace girih::programs {

struct Corpus {
  at::Tensor train, held_out;  // uint8 [bytes]
  uint64_t digest;             // of all bytes in order
};

// A file, or every file below a folder in the order of their names, without what is hidden, linked, in the
// folder of a run, not text (a zero byte) or there twice. Cut into stretches of 64 KiB, or a twentieth of
// less, the last of every twenty is held out. Throws c10::ValueError where that leaves less than `context`
// bytes for a side.
Corpus read_corpus(const std::filesystem::path& path, int64_t context);

// `count` windows of `context` bytes at places drawn by `seed`: where they begin, int64 [count].
at::Tensor drawn(const at::Tensor& text, int64_t count, int64_t context, uint64_t seed);
// At most `count` that do not overlap, evenly spread.
at::Tensor spread(const at::Tensor& text, int64_t count, int64_t context);
// The windows that begin at `starts`, as tokens, int64 [windows, context].
at::Tensor windows_of(const at::Tensor& text, const at::Tensor& starts, int64_t context);

}  // namespace girih::programs
