// Token-by-token decoding of a language model, with CUDA graphs where they are available.
#pragma once

#include <girih/language_model.h>

#include <map>

namespace girih::nn {

// Captures device work for replay.
class Recorder {
 public:
  virtual ~Recorder() = default;
  // Captures the device work of `work` without executing it. The returned function executes it.
  virtual std::function<void()> record(const std::function<void()>& work) = 0;
};

// A recorder of CUDA graphs on the device of ids; null if ids are on the CPU or capture is not possible.
std::unique_ptr<Recorder> recorder_for(const Tensor& ids);

// Continues a batch of texts with each call. A step has one token for every sequence. For each kind of step
// that LayerImpl::stepped reports, the first step runs eagerly, the second is captured, later ones are
// replayed. All graphs are dropped when a key-value cache grows.
class Decoder {
 public:
  // recorder: null: every step runs eagerly.
  Decoder(LanguageModelImpl& model, std::unique_ptr<Recorder> recorder)
      : model_(model), recorder_(std::move(recorder)) {}
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;

  // ids [B, T] -> logits of the token after them, [B, vocab_size]; the next call may overwrite the result.
  Tensor operator()(const Tensor& ids, const Tensor& attention_mask = {});
  const State& state() const { return state_; }

 private:
  struct Step {
    std::function<void()> replay;
    Tensor logits;  // output of the replay
  };
  Tensor run(const Tensor& ids, const Tensor& attention_mask);
  std::function<void()> recorded(const State& after, const Tensor& logits);

  LanguageModelImpl& model_;
  std::unique_ptr<Recorder> recorder_;
  State state_;
  Tensor ids_;  // input of captured steps
  std::map<std::vector<int64_t>, Step> steps_;
};

}  // namespace girih::nn
