#include <ATen/Parallel.h>

#if __has_include(<catch2/catch_session.hpp>)
#include <catch2/catch_session.hpp>
#else
#define CATCH_CONFIG_RUNNER
#undef CHECK  // torch's logging has one too
#include <catch2/catch.hpp>
#endif

int main(int argc, char** argv) {
  at::set_num_threads(1);  // the tests are small: more threads cost more than they give
  return Catch::Session().run(argc, argv);
}
