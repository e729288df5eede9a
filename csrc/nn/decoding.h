// A text token by token, each a CUDA graph where there can be one.
#pragma once

#include <girih/language_model.h>

#include <map>

namespace girih::nn {

// Makes work on the device that can be done again.
class Recorder {
 public:
  virtual ~Recorder() = default;
  // What does again what `work` does on the device, which has done nothing of it on return.
  virtual std::function<void()> record(const std::function<void()>& work) = 0;
};

// CUDA graphs of what continues ids; null where they are not on a GPU, or none can be recorded.
std::unique_ptr<Recorder> recorder_for(const Tensor& ids);

// Texts of one model that go on with each call. A step, of one token for every sequence, runs as ever the
// first time, is recorded the second time and replayed from then on, for each kind of step that the model
// tells (LayerImpl::stepped). All that was recorded is dropped where keys need more room.
class Decoder {
 public:
  // recorder: null for steps that run as ever.
  Decoder(LanguageModelImpl& model, std::unique_ptr<Recorder> recorder)
      : model_(model), recorder_(std::move(recorder)) {}
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;

  // ids [B, T] -> the logits after the last of them, [B, vocab_size], there until the next call.
  Tensor operator()(const Tensor& ids, const Tensor& attention_mask = {});
  const State& state() const { return state_; }

 private:
  struct Step {
    std::function<void()> replay;
    Tensor logits;  // where it leaves them
  };
  Tensor run(const Tensor& ids, const Tensor& attention_mask);
  std::function<void()> recorded(const State& after, const Tensor& logits);

  LanguageModelImpl& model_;
  std::unique_ptr<Recorder> recorder_;
  State state_;
  Tensor ids_;  // where steps read them
  std::map<std::vector<int64_t>, Step> steps_;
};

}  // namespace girih::nn
