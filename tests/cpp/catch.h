// Catch2 as Debian 12 (2.13) and Ubuntu 24.04 (3) have it.
#pragma once

#include <c10/util/Logging.h>

#undef CHECK  // torch's logging has one too, and would bring it later
#if __has_include(<catch2/catch_test_macros.hpp>)
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
using Catch::Matchers::ContainsSubstring;
#else
#include <catch2/catch.hpp>
inline auto ContainsSubstring(const std::string& part) { return Catch::Matchers::Contains(part); }
#endif
