// What attention's steps read of the slots that keys and values stand in.
#pragma once

#include "layer.h"

namespace girih::nn {

// Made once for so many slots. None of it belongs to a sequence.
struct Slots {
  Tensor turn;  // [slots, 2, head_dim]: x * turn[i, 0] + x.roll(D / 2) * turn[i, 1] is `rotary` at position i
  Tensor see;   // [2 slots - 1]: what is added to the scores of a token at i, from slots - 1 - i on
  double theta;
  int64_t window;  // tokens that a query sees, or 0: all
};

// Those that are the same in several layers of a model become one: `turn` is as large as one sequence's keys
// and values of one head.
void share_slots(State& state);

}  // namespace girih::nn
