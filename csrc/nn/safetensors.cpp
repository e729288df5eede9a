#include "safetensors.h"

#include <ATen/ATen.h>

#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

namespace girih::nn {
namespace {

using nlohmann::json;

const std::map<std::string, at::ScalarType> kDtypes = {{"F64", at::kDouble},
                                                       {"F32", at::kFloat},
                                                       {"F16", at::kHalf},
                                                       {"BF16", at::kBFloat16},
                                                       {"I64", at::kLong}};

const std::string& name_of(at::ScalarType type) {
  for (const auto& [name, dtype] : kDtypes) {
    if (dtype == type) return name;
  }
  throw std::runtime_error(std::string("safetensors: no name for dtype ") + c10::toString(type));
}

[[noreturn]] void refuse(const std::filesystem::path& file, const std::string& why) {
  throw std::runtime_error(file.string() + ": " + why);
}

}  // namespace

NamedTensors read_safetensors(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary);
  if (!in) refuse(file, "cannot be opened");
  const uint64_t size = std::filesystem::file_size(file);
  uint64_t header_size = 0;  // little-endian, as every machine that torch runs on
  in.read(reinterpret_cast<char*>(&header_size), sizeof header_size);
  if (!in || header_size > size - sizeof header_size) refuse(file, "is not a safetensors file");
  std::string text(header_size, '\0');
  in.read(text.data(), std::streamsize(header_size));
  const uint64_t begin = sizeof header_size + header_size;

  NamedTensors tensors;
  try {
    const auto header = json::parse(text);
    for (const auto& [name, entry] : header.items()) {
      if (name == "__metadata__") continue;
      const auto dtype = kDtypes.find(entry.at("dtype").get<std::string>());
      if (dtype == kDtypes.end()) refuse(file, name + " has dtype " + entry.at("dtype").dump());
      const auto [from, to] = entry.at("data_offsets").get<std::pair<uint64_t, uint64_t>>();
      const auto tensor = at::empty(entry.at("shape").get<std::vector<int64_t>>(), dtype->second);
      if (from > to || to - from != tensor.nbytes() || to > size - begin) refuse(file, name + " is cut off");
      in.seekg(std::streamoff(begin + from));
      in.read(static_cast<char*>(tensor.data_ptr()), std::streamsize(to - from));
      if (!in) refuse(file, name + " cannot be read");
      tensors.emplace(name, tensor);
    }
  } catch (const json::exception& error) {
    refuse(file, std::string("is not a safetensors file: ") + error.what());
  }
  return tensors;
}

void write_safetensors(const std::filesystem::path& file, const NamedTensors& tensors) {
  json header = {{"__metadata__", {{"format", "pt"}}}};
  uint64_t end = 0;
  for (const auto& [name, tensor] : tensors) {
    const auto from = end;
    end += tensor.nbytes();
    header[name] = {{"dtype", name_of(tensor.scalar_type())},
                    {"shape", tensor.sizes().vec()},
                    {"data_offsets", {from, end}}};
  }
  auto text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // the tensors begin at a multiple of 8
  const uint64_t header_size = text.size();

  const auto partial = file.string() + ".partial";
  std::ofstream out(partial, std::ios::binary);
  out.write(reinterpret_cast<const char*>(&header_size), sizeof header_size);
  out.write(text.data(), std::streamsize(text.size()));
  for (const auto& [name, tensor] : tensors) {
    const auto bytes = tensor.detach().to(at::kCPU).contiguous();
    out.write(static_cast<const char*>(bytes.data_ptr()), std::streamsize(bytes.nbytes()));
  }
  out.close();
  if (!out) {
    std::remove(partial.c_str());
    refuse(file, "cannot be written");
  }
  if (std::rename(partial.c_str(), file.c_str()) != 0) refuse(file, "cannot be written");
}

}  // namespace girih::nn
