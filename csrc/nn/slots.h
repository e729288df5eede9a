// Tables that a decoding step of attention reads, one entry for each slot of the key-value cache.
#pragma once

#include "layer.h"

namespace girih::nn {

// Depends only on the number of slots and on the layer's options; shared by all sequences.
struct Slots {
  // Rotary factors [slots, 2, head_dim]: rotary(x, i) = x * turn[i, 0] + x.roll(D / 2) * turn[i, 1].
  Tensor turn;
  // Additive mask [2 slots - 1], 0 or -inf: see[slots - 1 - i + j] is added to the score of query i and key
  // j.
  Tensor see;
  double theta;
  int64_t window;  // tokens that a query attends to; 0: all
};

// Makes layers of a model with equal tables share one object: `turn` is as large as the keys and values of
// one head of a sequence.
void share_slots(State& state);

}  // namespace girih::nn
