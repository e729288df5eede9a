// Ends a process that has loaded another PyTorch than this library was built for, in one line. PyTorch's C++
// classes change between minor versions, and a mismatch crashes. Where a function's address in libgirih.so's
// data is missing, the dynamic linker ends the process before this, with the function's name.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/version.h>

#include <cstdio>
#include <cstdlib>

namespace {

// Before the initialisers of this library, which register operators.
[[gnu::constructor(101)]] void check_torch_version() {
  const auto version = aoti_torch_abi_version();  // of the torch that is loaded: 2.15.0 is 2 << 56 | 15 << 48
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
