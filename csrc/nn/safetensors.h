// The safetensors format: 8 bytes with the length of the header, the header in JSON, the bytes of the
// tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <functional>
#include <map>
#include <ostream>
#include <string>
#include <vector>

namespace girih::nn {

// A file of tensors. The constructor checks that every tensor has the bytes of its shape and that the tensors
// are contiguous and fill the file, and throws std::runtime_error otherwise.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(std::filesystem::path file);

  struct Entry {
    at::ScalarType dtype;
    std::vector<int64_t> shape;
    uint64_t begin, end;  // offsets in the file
  };
  const std::map<std::string, Entry>& entries() const { return entries_; }
  const std::filesystem::path& file() const { return file_; }
  // The tensor on the CPU, in the dtype of the file.
  at::Tensor read(const Entry& entry) const;

 private:
  std::filesystem::path file_;
  std::map<std::string, Entry> entries_;
};

using NamedTensors = std::map<std::string, at::Tensor>;
void write_safetensors(const std::filesystem::path& file, const NamedTensors& tensors);

// Writes a file atomically: calls `write` on a temporary file in the same folder and renames it to `file`.
void write_whole(const std::filesystem::path& file, const std::function<void(std::ostream&)>& write);

// A name for an error message: in quotes, escaped, at most 100 characters.
std::string quoted(const std::string& name);

}  // namespace girih::nn
