// The safetensors format: 8 bytes with the header's length, a header in JSON, the tensors' bytes.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <functional>
#include <map>
#include <ostream>
#include <string>
#include <vector>

namespace girih::nn {

// A file of tensors. All that it says of them is checked when it is opened: each has the bytes of its shape,
// they lie one behind the other and fill the file. Throws std::runtime_error otherwise.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(std::filesystem::path file);

  struct Entry {
    at::ScalarType dtype;
    std::vector<int64_t> shape;
    uint64_t begin, end;  // in the file
  };
  const std::map<std::string, Entry>& entries() const { return entries_; }
  const std::filesystem::path& file() const { return file_; }
  // On the CPU, in the file's dtype.
  at::Tensor read(const Entry& entry) const;

 private:
  std::filesystem::path file_;
  std::map<std::string, Entry> entries_;
};

using NamedTensors = std::map<std::string, at::Tensor>;
void write_safetensors(const std::filesystem::path& file, const NamedTensors& tensors);

// What `write` puts out, whole or not at all: written beside `file` and moved there.
void write_whole(const std::filesystem::path& file, const std::function<void(std::ostream&)>& write);

// A name as a message shows it: in quotes, in one short line whatever it holds.
std::string quoted(const std::string& name);

}  // namespace girih::nn
