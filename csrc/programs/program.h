// Functions of both programs: exit codes, the device option, bytes as tokens.
#pragma once

#include <torch/cuda.h>
#include <torch/types.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <iostream>
#include <string>
#include <vector>

namespace girih::programs {

// Parses the arguments, runs `work` and returns its exit code. An error is one line on stderr and exit
// code 2.
template <class Work>
int run_program(CLI::App& app, int argc, char** argv, const Work& work) {
  const auto program = app.get_name();
  try {
    app.parse(argc, argv);
    const int code = work();
    if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return code;
    std::cerr << program << ": standard output cannot be written\n";
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    std::cerr << program << ": " << text.substr(0, text.find('\n')) << '\n';
  } catch (const std::exception& error) {
    std::cerr << program << ": " << error.what() << '\n';
  }
  return 2;
}

// The device of --device. "": the GPU if there is one, else the CPU.
inline at::Device parse_device(const std::string& name) {
  if (name.empty()) return torch::cuda::is_available() ? at::kCUDA : at::kCPU;
  TORCH_CHECK_VALUE(name == "cpu" || name == "cuda", "--device is ", name, "; expected cpu or cuda");
  TORCH_CHECK_VALUE(name == "cpu" || torch::cuda::is_available(),
                    "--device is cuda, but no GPU is available");
  return name;
}

inline std::vector<int64_t> to_byte_ids(const std::string& text) {
  std::vector<int64_t> ids;
  for (const unsigned char byte : text) ids.push_back(byte);
  return ids;
}

}  // namespace girih::programs
