// Products of warpgroups (tile/warpgroup.h), as late as a kernel lets them be: they read their factors, and
// write their sums, when somebody waits for them. A tile that is given back before, a left factor whose
// registers have something else by then, sums that are read before: all of these come out wrong. With
// early_products some are as early as they can be, and find what no fence has brought them. Registers that no
// fence has brought them would go unseen here, where a compiler moves nothing across: so fences are checked.
#pragma once

#include "emulator.h"

namespace emulated {

inline size_t to_stack_end(const void* from) {
  return current->stack + kStackBytes - static_cast<const char*>(from);
}
// The compiler has these sums, as they are, in their registers.
template <class Sums>
void pin_registers(const Sums& sums) {
  const char* const at = reinterpret_cast<const char*>(&sums);
  current->pinned[at].assign(at, at + sizeof sums);
}
// What the thread has in its registers products started later find, as it is here.
template <class... Sums>
[[gnu::noinline]] void fence_registers(const Sums&... sums) {
  const char* const from = static_cast<const char*>(__builtin_frame_address(0));
  current->registers.assign(from, from + to_stack_end(from));
  current->is_fenced = true, current->started.clear();
  (pin_registers(sums), ...);
}
inline bool is_fenced(const void* registers, size_t bytes) {
  const size_t left = to_stack_end(registers), kept = current->registers.size();
  return left <= kept && std::memcmp(registers, current->registers.data() + kept - left, bytes) == 0;
}
// Products need a fence behind every wait, and behind all that has been written to their left factor. What
// sums hold that they are added to has a fence behind it too, unless products are adding to it, and a fence
// or a wait names them as they are.
template <class Sums>
void check_fence(const Sums& sums, bool add) {
  if (!current->is_fenced) fail("products without a fence before them");
  if (!current->started.insert(&sums).second || !add) return;
  const auto pinned = current->pinned.find(&sums);
  if (pinned == current->pinned.end() || std::memcmp(&sums, pinned->second.data(), sizeof sums) != 0)
    fail("products are added to sums that no fence names");
  if (!is_fenced(&sums, sizeof sums)) fail("products are added to sums that were written behind the fence");
}
template <class Left>
void check_fence(const Left& left) {
  if (!is_fenced(&left, sizeof left)) fail("products' left factor was written behind the fence");
}
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
inline void wgmma_commit() {
  current->products.push_back(nullptr);  // the end of a group
  // All of a warp alike.
  const unsigned turn = (current->exchanges + 31 * (current->thread / 32)) * 2654435761u;
  if (early_products && turn >> 30 == 0) {
    yield();  // what the warp has fenced is there after its turn
    finish_products(0);
  }
}
template <class... Sums>
void wgmma_wait(int pending, const Sums&... sums) {
  const auto& products = current->products;
  const auto groups = std::count(products.begin(), products.end(), nullptr);
  for (int turns = 0; groups > pending && turns < 4; ++turns) yield();
  finish_products(pending);
  current->is_fenced = false;
  (pin_registers(sums), ...);
}

}  // namespace emulated
