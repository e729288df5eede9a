#include <ATen/Parallel.h>

#if __has_include(<catch2/catch_session.hpp>)
#include <catch2/catch_session.hpp>
#else
#define CATCH_CONFIG_RUNNER
#undef CHECK  // torch's logging defines CHECK too
#include <catch2/catch.hpp>
#endif

int main(int argc, char** argv) {
  at::set_num_threads(1);  // the tests are small: more threads are slower
  return Catch::Session().run(argc, argv);
}
