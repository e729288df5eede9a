// What the programs have in common: how they end, and bytes as tokens.
#pragma once

#include <torch/cuda.h>
#include <torch/types.h>

#include <exception>
#include <iostream>
#include <string>
#include <vector>

namespace girih::programs {

// The exit code of `work`; what a person can put right is one line on stderr and code 2.
template <class Work>
int answer(const char* program, const Work& work) {
  try {
    return work();
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    std::cerr << program << ": " << text.substr(0, text.find('\n')) << '\n';
  } catch (const std::exception& error) {
    std::cerr << program << ": " << error.what() << '\n';
  }
  return 2;
}

// "" is the GPU where there is one.
inline at::Device device_of(const std::string& name) {
  if (name.empty()) return torch::cuda::is_available() ? at::kCUDA : at::kCPU;
  TORCH_CHECK_VALUE(name == "cpu" || name == "cuda", "--device is ", name, "; expected cpu or cuda");
  TORCH_CHECK_VALUE(name == "cpu" || torch::cuda::is_available(), "--device is cuda; there is none here");
  return name;
}

inline std::vector<int64_t> bytes_of(const std::string& text) {
  std::vector<int64_t> ids;
  for (const unsigned char byte : text) ids.push_back(byte);
  return ids;
}

}  // namespace girih::programs
