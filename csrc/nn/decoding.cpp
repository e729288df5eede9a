#include "decoding.h"

#include <ATen/ATen.h>

namespace girih::nn {
namespace {

// Whether a captured step returned the state `expected`: the tensors that `expected` shares with `before` are
// the same objects in `after`, and the others, which live on the host, have equal values.
bool as_expected(const State& before, const State& expected, const State& after) {
  if (after.tensors.size() != before.tensors.size() || after.parts.size() != before.parts.size() ||
      after.tokens != expected.tokens || after.slots != before.slots)
    return false;
  for (size_t i = 0; i < before.tensors.size(); ++i) {
    const auto &was = before.tensors[i], &is = after.tensors[i], &wanted = expected.tensors[i];
    if (wanted.is_same(was) ? !is.is_same(was) : !is.equal(wanted)) return false;
  }
  for (size_t i = 0; i < before.parts.size(); ++i) {
    if (!as_expected(before.parts[i], expected.parts[i], after.parts[i])) return false;
  }
  return true;
}

}  // namespace

#ifndef GIRIH_WITH_CUDA  // otherwise defined in graph/cuda.cpp
std::unique_ptr<Recorder> recorder_for(const Tensor&) { return nullptr; }
#endif

Tensor Decoder::operator()(const Tensor& ids, const Tensor& attention_mask) {
  auto after = state_;
  std::vector<int64_t> kind;
  if (!recorder_ || state_.empty() || attention_mask.defined() || ids.size(1) != 1 ||
      !model_.model->stepped(after, kind)) {
    steps_.clear();
    return run(ids, attention_mask);
  }
  auto& step = steps_[kind];
  if (!step.logits.defined()) return step.logits = run(ids, {});
  if (!step.replay) {
    if (!ids_.defined()) ids_ = ids.clone();
    step.replay = recorded(after, step.logits);
    if (!step.replay) {
      recorder_.reset();
      steps_.clear();
      return run(ids, {});
    }
  }
  ids_.copy_(ids);
  step.replay();
  state_ = std::move(after);
  return step.logits;
}

Tensor Decoder::run(const Tensor& ids, const Tensor& attention_mask) {
  auto [x, after] = model_.model->forward(ids, attention_mask, state_, /*use_cache=*/true);
  state_ = std::move(after);
  return model_.head(x.select(1, -1));
}

// Captures a step from state_ to `after`; null if the capture fails.
std::function<void()> Decoder::recorded(const State& after, const Tensor& logits) {
  try {
    return recorder_->record([this, before = state_, after, logits] {
      auto [x, now] = model_.model->forward(ids_, {}, before, /*use_cache=*/true);
      TORCH_CHECK(as_expected(before, after, now),
                  "a captured step returned other tensors than those of the state");
      logits.copy_(model_.head(x.select(1, -1)));
    });
  } catch (const std::exception& error) {  // work that cannot be captured; the device ran nothing
    const auto* known = dynamic_cast<const c10::Error*>(&error);
    TORCH_WARN("a decoding step cannot be captured as a CUDA graph and runs eagerly: ",
               known != nullptr ? known->what_without_backtrace() : error.what());
    return {};
  }
}

}  // namespace girih::nn
