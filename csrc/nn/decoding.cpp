#include "decoding.h"

#include <ATen/ATen.h>

namespace girih::nn {
namespace {

// Whether a captured step returned the state `expected`: the tensors that `expected` shares with `before` are
// the same objects in `after`, and the others, which live on the host, have equal values.
bool is_expected_state(const State& before, const State& expected, const State& after) {
  if (after.tensors.size() != before.tensors.size() || after.parts.size() != before.parts.size() ||
      after.tokens != expected.tokens || after.slots != before.slots)
    return false;
  for (size_t i = 0; i < before.tensors.size(); ++i) {
    const auto &old_tensor = before.tensors[i], &is = after.tensors[i],
               &expected_tensor = expected.tensors[i];
    if (expected_tensor.is_same(old_tensor) ? !is.is_same(old_tensor) : !is.equal(expected_tensor))
      return false;
  }
  for (size_t i = 0; i < before.parts.size(); ++i) {
    if (!is_expected_state(before.parts[i], expected.parts[i], after.parts[i])) return false;
  }
  return true;
}

}  // namespace

#ifndef GIRIH_WITH_CUDA  // otherwise defined in graph/cuda.cpp
std::unique_ptr<GraphRecorder> make_recorder(const Tensor&) { return nullptr; }
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
    step.replay = capture_step(after, step.logits);
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
std::function<void()> Decoder::capture_step(const State& after, const Tensor& logits) {
  try {
    return recorder_->record([this, before = state_, after, logits] {
      auto [x, captured_state] = model_.model->forward(ids_, {}, before, /*use_cache=*/true);
      TORCH_CHECK(is_expected_state(before, after, captured_state),
                  "a captured step returned other tensors than those of the state");
      logits.copy_(model_.head(x.select(1, -1)));
    });
  } catch (const std::exception& error) {  // work that cannot be captured; the device ran nothing
    const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
    TORCH_WARN("a decoding step cannot be captured as a CUDA graph and runs eagerly: ",
               torch_error != nullptr ? torch_error->what_without_backtrace() : error.what());
    return {};
  }
}

}  // namespace girih::nn
