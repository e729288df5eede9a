// Products of warpgroups (tile/warpgroup.h), as late as a kernel lets them be: they read their factors, and
// write their sums, when somebody waits for them. A tile that is given back before, a left factor whose
// registers have something else by then, sums that are read before: all of these come out wrong.
#pragma once

#include "emulator.h"

namespace emulated {

template <class F>
void start_products(const F& f) {
  current->products.push_back(f);
}
inline void commit_products() { current->products.push_back(nullptr); }  // the end of a group
inline void wait_products(int pending) {
  auto& products = current->products;
  auto groups = std::count(products.begin(), products.end(), nullptr);
  for (int turns = 0; groups > pending && turns < 4; ++turns) yield();
  for (; groups > pending; products.pop_front()) {
    if (products.front() == nullptr) {
      --groups;
    } else {
      products.front()();
    }
  }
}

}  // namespace emulated
