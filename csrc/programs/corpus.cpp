// Reads a corpus, splits it and takes windows of it.
#include "corpus.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/randint.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <list>
#include <set>
#include <string_view>
#include <vector>

namespace girih::programs {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kStretch = 64 * 1024, kHeldOut = 20;

std::vector<fs::path> text_files(const fs::path& path) {
  if (fs::is_regular_file(path)) return {path};
  TORCH_CHECK_VALUE(fs::is_directory(path), "corpus ", path.string(), ": no such file or folder");
  std::vector<fs::path> files;
  for (fs::recursive_directory_iterator at(path), end; at != end; ++at) {
    if (at->path().filename().string().starts_with('.') || fs::exists(at->path() / "arguments.json")) {
      at.disable_recursion_pending();
    } else if (at->is_regular_file() && !at->is_symlink()) {
      files.push_back(at->path());
    }
  }
  std::ranges::sort(files);
  return files;
}

}  // namespace

Corpus read_corpus(const fs::path& path, int64_t context) {
  std::list<std::string> kept;
  std::set<std::string_view> seen;
  std::string all;
  for (const auto& file : text_files(path)) {
    std::ifstream in(file, std::ios::binary);
    kept.emplace_back(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
    TORCH_CHECK_VALUE(in, "corpus ", file.string(), ": cannot be read");
    if (kept.back().find('\0') == std::string::npos && seen.insert(kept.back()).second) {
      all += kept.back();
    } else {
      kept.pop_back();
    }
  }
  const auto size = static_cast<int64_t>(all.size());
  TORCH_CHECK_VALUE(size > 0, "corpus ", path.string(), ": no text in it");
  TORCH_CHECK_VALUE(size >= kHeldOut * context, "corpus ", path.string(), ": ", size,
                    " bytes are too short, ", kHeldOut * context, " or more are needed");
  const auto stretches =
      at::from_blob(all.data(), {size}, at::kByte).split(std::min(kStretch, size / kHeldOut));
  std::vector<at::Tensor> train, held_out;
  for (size_t i = 0; i < stretches.size(); ++i)
    (i % kHeldOut == kHeldOut - 1 ? held_out : train).push_back(stretches[i]);
  uint64_t digest = 14695981039346656037u;  // FNV-1a
  for (const unsigned char byte : all) digest = (digest ^ byte) * 1099511628211u;
  return {at::cat(train), at::cat(held_out), digest};
}

at::Tensor drawn(const at::Tensor& text, int64_t count, int64_t context, uint64_t seed) {
  return at::randint(text.size(0) - context + 1, {count}, at::make_generator<at::CPUGeneratorImpl>(seed),
                     at::kLong);
}

at::Tensor spread(const at::Tensor& text, int64_t count, int64_t context) {
  const auto whole = text.size(0) / context;
  count = std::min(count, whole);
  return (at::arange(count, at::kLong) * whole).div(count, "floor") * context;
}

at::Tensor windows_of(const at::Tensor& text, const at::Tensor& starts, int64_t context) {
  const auto places = starts.unsqueeze(1) + at::arange(context, at::kLong);
  return text.index_select(0, places.flatten()).view({starts.size(0), context}).to(at::kLong);
}

}  // namespace girih::programs
