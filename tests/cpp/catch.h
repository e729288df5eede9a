// Catch2 2.13 (Debian 12) and Catch2 3 (Ubuntu 24.04).
#pragma once

#include <c10/util/Logging.h>

#undef CHECK  // defined by c10/util/Logging.h, which is included first so that no later include redefines it
#if __has_include(<catch2/catch_test_macros.hpp>)
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
using Catch::Matchers::ContainsSubstring;
#else
#include <catch2/catch.hpp>
inline auto ContainsSubstring(const std::string& part) { return Catch::Matchers::Contains(part); }
#endif
