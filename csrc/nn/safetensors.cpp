#include "safetensors.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

namespace girih::nn {
namespace {

using nlohmann::json;
using std::filesystem::path;

const std::map<std::string, at::ScalarType> kDtypes = {{"F64", at::kDouble},
                                                       {"F32", at::kFloat},
                                                       {"F16", at::kHalf},
                                                       {"BF16", at::kBFloat16},
                                                       {"I64", at::kLong}};
constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // limit of the format

const std::string& dtype_name(at::ScalarType type) {
  for (const auto& [name, dtype] : kDtypes) {
    if (dtype == type) return name;
  }
  throw std::runtime_error(std::string("safetensors: no name for dtype ") + c10::toString(type));
}

[[noreturn]] void refuse(const path& file, const std::string& why) {
  throw std::runtime_error(file.string() + ": " + why);
}

// The header as JSON; discarded if the text is not JSON or has a duplicate name.
json parse_header(const std::string& text) {
  std::set<std::string> names;
  bool has_duplicate = false;
  auto header = json::parse(
      text,
      [&](int depth, json::parse_event_t event, json& key) {
        if (depth == 1 && event == json::parse_event_t::key)
          has_duplicate = !names.insert(key.get<std::string>()).second || has_duplicate;
        return true;
      },
      /*allow_exceptions=*/false);
  return has_duplicate ? json(json::value_t::discarded) : header;
}

// The list of non-negative integers at `key`; nullopt if the value is anything else.
std::optional<std::vector<uint64_t>> read_integers(const json& entry, const char* key) {
  const auto list = entry.find(key);
  if (list == entry.end() || !list->is_array()) return {};
  std::vector<uint64_t> numbers;
  for (const auto& number : *list) {
    if (!number.is_number_unsigned() || number.get<uint64_t>() > INT64_MAX) return {};
    numbers.push_back(number.get<uint64_t>());
  }
  return numbers;
}

// Bytes of a tensor; nullopt on overflow.
std::optional<uint64_t> count_bytes(const std::vector<uint64_t>& shape, at::ScalarType dtype) {
  if (std::ranges::count(shape, 0) > 0) return 0;
  uint64_t bytes = at::elementSize(dtype);
  for (const auto size : shape) {
    if (size > INT64_MAX / bytes) return {};
    bytes *= size;
  }
  return bytes;
}

}  // namespace

std::string quote(const std::string& name) {
  const auto text = json(name).dump(-1, ' ', /*ensure_ascii=*/true, json::error_handler_t::replace);
  return text.size() <= 100 ? text : text.substr(0, 97) + "...";
}

SafetensorsFile::SafetensorsFile(path name) : file_(std::move(name)) {
  std::error_code error;
  if (!is_regular_file(file_, error)) refuse(file_, "is not a file");
  const uint64_t size = file_size(file_, error);
  std::ifstream in(file_, std::ios::binary);
  if (error || !in) refuse(file_, "cannot be opened");
  uint64_t header_size = 0;  // little-endian, like every machine that torch supports
  in.read(reinterpret_cast<char*>(&header_size), sizeof header_size);
  if (!in || header_size > std::min(size - sizeof header_size, kMaxHeaderBytes))
    refuse(file_, "is not a safetensors file: its header is cut off");
  std::string text(header_size, '\0');
  in.read(text.data(), std::streamsize(header_size));
  const uint64_t data = sizeof header_size + header_size;
  const auto header = in ? parse_header(text) : json();
  if (!header.is_object())
    refuse(file_, "is not a safetensors file: its header is not a JSON object of tensors with a name each");

  std::vector<std::pair<uint64_t, uint64_t>> byte_ranges;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    const auto refuse_entry = [&](const std::string& why) { refuse(file_, quote(name) + " " + why); };
    if (!entry.is_object()) refuse_entry("is not an object");
    const auto dtype_field = entry.find("dtype");
    const auto dtype = dtype_field != entry.end() && dtype_field->is_string()
                           ? kDtypes.find(dtype_field->get<std::string>())
                           : kDtypes.end();
    if (dtype == kDtypes.end()) refuse_entry("should have dtype F64, F32, F16, BF16 or I64");
    const auto shape = read_integers(entry, "shape"), offsets = read_integers(entry, "data_offsets");
    if (!shape) refuse_entry("should have a shape, a list of sizes");
    if (!offsets || offsets->size() != 2) refuse_entry("should have data_offsets, where it begins and ends");
    const auto [begin, end] = std::pair((*offsets)[0], (*offsets)[1]);
    if (begin > end || end > size - data) refuse_entry("lies outside of the file");
    if (count_bytes(*shape, dtype->second) != end - begin)
      refuse_entry("does not have the bytes of its shape");
    byte_ranges.emplace_back(begin, end);
    entries_.emplace(name, Entry{dtype->second, {shape->begin(), shape->end()}, data + begin, data + end});
  }
  std::ranges::sort(byte_ranges);
  uint64_t next = 0;
  for (const auto& [begin, end] : byte_ranges) {
    if (begin != next) refuse(file_, "has tensors that overlap or leave a gap");
    next = end;
  }
  if (next != size - data) refuse(file_, "has bytes behind its last tensor");
}

at::Tensor SafetensorsFile::read(const Entry& entry) const {
  const auto tensor = at::empty(entry.shape, entry.dtype);
  std::ifstream in(file_, std::ios::binary);
  in.seekg(std::streamoff(entry.begin));
  in.read(static_cast<char*>(tensor.data_ptr()), std::streamsize(entry.end - entry.begin));
  if (!in) refuse(file_, "cannot be read");
  return tensor;
}

void write_safetensors(const path& file, const NamedTensors& tensors) {
  json header = {{"__metadata__", {{"format", "pt"}}}};
  uint64_t end = 0;
  for (const auto& [name, tensor] : tensors) {
    const auto from = end;
    end += tensor.nbytes();
    header[name] = {{"dtype", dtype_name(tensor.scalar_type())},
                    {"shape", tensor.sizes().vec()},
                    {"data_offsets", {from, end}}};
  }
  auto text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // the tensors begin at a multiple of 8
  const uint64_t header_size = text.size();
  write_atomically(file, [&](std::ostream& out) {
    out.write(reinterpret_cast<const char*>(&header_size), sizeof header_size);
    out.write(text.data(), std::streamsize(text.size()));
    for (const auto& [name, tensor] : tensors) {
      const auto bytes = tensor.detach().to(at::kCPU).contiguous();
      out.write(static_cast<const char*>(bytes.data_ptr()), std::streamsize(bytes.nbytes()));
    }
  });
}

void write_atomically(const path& file, const std::function<void(std::ostream&)>& write) {
  // Removes the temporary file on every exit; after the rename there is none.
  struct Partial {
    path name;
    ~Partial() {
      std::error_code ignored;
      remove(name, ignored);
    }
  } const partial{file.string() + ".partial"};
  std::ofstream out(partial.name, std::ios::binary);
  write(out);
  out.close();
  std::error_code error;
  if (out) rename(partial.name, file, error);
  if (!out || error) refuse(file, "cannot be written");
}

}  // namespace girih::nn
