// A corpus of bytes: split into training and held-out text, and windows of it, as girih.data does in Python.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <string>

namespace girih::programs {

struct Corpus {
  at::Tensor train, held_out;  // uint8 [bytes]
  uint64_t digest;             // FNV-1a hash of all bytes in order
};

// Reads a file, or all files of a folder in the order of their names. Skips hidden files, links, folders of
// runs, files with a zero byte and duplicates. The text is cut into stretches of 64 KiB (a twentieth of a
// shorter text); the last of every twenty stretches is held out. Throws c10::ValueError unless both parts
// have `context` bytes.
Corpus read_corpus(const std::filesystem::path& path, int64_t context);

// Starts of `count` random windows of `context` bytes, int64 [count]. seed: of the random generator.
at::Tensor drawn(const at::Tensor& text, int64_t count, int64_t context, uint64_t seed);
// Starts of at most `count` windows, evenly spaced and without overlap.
at::Tensor spread(const at::Tensor& text, int64_t count, int64_t context);
// The windows at `starts`, as tokens, int64 [windows, context].
at::Tensor windows_of(const at::Tensor& text, const at::Tensor& starts, int64_t context);

}  // namespace girih::programs
