// Ends the process with one line if the loaded PyTorch has another minor version than the one of the build.
// C++ classes of PyTorch change between minor versions, and a mismatch crashes. If libgirih.so refers to the
// address of a function that is missing, the dynamic linker has already ended the process with the name of
// the function.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/version.h>

#include <cstdio>
#include <cstdlib>

namespace {

// Runs before the static initialisers of this library, which register operators.
[[gnu::constructor(101)]] void check_torch_version() {
  const auto version = aoti_torch_abi_version();  // of the loaded torch: 2.15.0 is 2 << 56 | 15 << 48
  const auto major = static_cast<int>(version >> 56), minor = static_cast<int>(version >> 48 & 0xff);
  if (major == TORCH_VERSION_MAJOR && minor == TORCH_VERSION_MINOR) return;
  std::fprintf(stderr,
               "libgirih.so was built for torch %d.%d, but torch %d.%d is loaded (girih supports "
               "torch " GIRIH_TORCH_OLDEST " to " GIRIH_TORCH_NEWEST
               "): load the libgirih.so of that version, or build one\n",
               TORCH_VERSION_MAJOR, TORCH_VERSION_MINOR, major, minor);
  std::_Exit(1);
}

}  // namespace
