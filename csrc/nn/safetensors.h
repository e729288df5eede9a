// The safetensors format: 8 bytes with the header's length, a header in JSON, the tensors' bytes.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <map>
#include <string>

namespace girih::nn {

using NamedTensors = std::map<std::string, at::Tensor>;

// On the CPU, in the file's dtypes. Throws std::runtime_error for a file that is not whole.
NamedTensors read_safetensors(const std::filesystem::path& file);
// Whole or not at all: written beside `file` and moved there.
void write_safetensors(const std::filesystem::path& file, const NamedTensors& tensors);

}  // namespace girih::nn
