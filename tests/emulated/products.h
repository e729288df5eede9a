// Products of warpgroups (tile/warpgroup.h), as late as a kernel lets them be: they read their factors, and
// write their sums, when somebody waits for them. A tile that is given back before, a left factor whose
// registers have something else by then, sums that are read before: all of these come out wrong. With
// early_products some are as early as they can be, and find what no fence has brought them.
#pragma once

#include "emulator.h"

namespace emulated {

template <class F>
void start_products(const F& f) {
  current->products.push_back(f);
}
inline void finish_products(int pending) {
  auto& products = current->products;
  auto groups = std::count(products.begin(), products.end(), nullptr);
  current->of_products = true;
  for (; groups > pending; products.pop_front()) {
    if (products.front() == nullptr) {
      --groups;
    } else {
      products.front()();
    }
  }
  current->of_products = false;
}
inline void commit_products() {
  current->products.push_back(nullptr);  // the end of a group
  // All of a warp alike.
  const unsigned turn = (current->exchanges + 31 * (current->thread / 32)) * 2654435761u;
  if (early_products && turn >> 30 == 0) {
    yield();  // what the warp has fenced is there after its turn
    finish_products(0);
  }
}
inline void wait_products(int pending) {
  const auto& products = current->products;
  const auto groups = std::count(products.begin(), products.end(), nullptr);
  for (int turns = 0; groups > pending && turns < 4; ++turns) yield();
  finish_products(pending);
}

}  // namespace emulated
