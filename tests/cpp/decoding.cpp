// A decoding step is recorded once, and later steps are replays of the recording. On the CPU a recording
// reruns the work with the tensors and the host values of the recorded call, as a CUDA graph does. With
// kernels and a GPU the same tests run with CUDA graphs.
#include "../../csrc/nn/decoding.h"

#include <ATen/Context.h>
#include <torch/cuda.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <thread>

#include "catch.h"
#include "models.h"

using at::Tensor;
using namespace girih;
using namespace girih::test;

namespace {

struct Counts {
  int recorded = 0, replayed = 0;
};

class CountingRecorder final : public nn::GraphRecorder {
 public:
  CountingRecorder(Counts& counts, std::unique_ptr<nn::GraphRecorder> inner)
      : counts_(counts), inner_(std::move(inner)) {}

  std::function<void()> record(const std::function<void()>& work) override {
    ++counts_.recorded;
    return [&counts = counts_, replay = inner_ ? inner_->record(work) : work] {
      ++counts.replayed;
      replay();
    };
  }

 private:
  Counts& counts_;
  std::unique_ptr<nn::GraphRecorder> inner_;
};

class Warnings final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override { messages.push_back(warning.msg()); }
  std::vector<std::string> messages;
};

class FailingRecorder final : public nn::GraphRecorder {
  std::function<void()> record(const std::function<void()>&) override {
    throw std::runtime_error("not here");
  }
};

// The CPU, and the GPU if kernels are available.
std::vector<at::Device> devices() {
  std::vector<at::Device> all{at::kCPU};
  if (torch::cuda::is_available() &&
      nn::make_recorder(at::zeros({1, 1}, at::device(at::kCUDA).dtype(at::kLong))))
    all.emplace_back(at::kCUDA, 0);
  return all;
}

std::vector<nn::Config> decoding_configurations() {
  auto all = configurations();
  auto with = [&](const auto& change) {
    auto config = configurations()[0];
    change(config);
    all.push_back(with_sizes(config, 5));
  };
  with([](auto& c) { c.hybrid = {"gsa", "attention", "gated_deltanet"}, c.num_hidden_layers = 3; });
  with([](auto& c) { c.hybrid = {"attention", "gla"}, c.num_heads = 4, c.num_kv_heads = 2; });
  with([](auto& c) { c.mixer = "mag", c.mag_base = "cat", c.mag_mixer = "attention"; });
  with([](auto& c) { c.mixer = "cat", c.running_positions = true; });
  for (auto& config : all) config.initializer_range = 0.2;  // logits depend on earlier tokens
  return all;
}

bool has_cat(const nn::Config& config) {
  return std::ranges::count(config.mixers(), "cat") > 0 || config.mag_base == "cat";
}

// fp64 with the ATen forms, fp32 with kernels.
nn::LanguageModel model_on(at::Device device, const nn::Config& config) {
  auto model = in_double(config);
  if (device.is_cuda()) model->to(device, at::kFloat);
  return model;
}

bool close(const Tensor& a, const Tensor& b) {
  const double most = a.scalar_type() == at::kDouble ? 1e-9 : 1e-3;
  return at::allclose(a, b, most, most);
}

// Decodes a text step by step after its first `prompt` tokens and compares with the logits of one forward.
void check_steps(nn::LanguageModel& model, nn::Decoder& decode, const Tensor& text, int64_t prompt,
                 const Tensor& mask = {}) {
  Tensor all;
  if (mask.defined()) all = at::cat({mask, mask.new_ones({text.size(0), text.size(1) - prompt})}, 1);
  const auto whole = model(text, all).first;
  REQUIRE(close(decode(text.slice(1, 0, prompt), mask), whole.select(1, prompt - 1)));
  for (auto t = prompt; t < text.size(1); ++t) {
    INFO("token " << t);
    REQUIRE(close(decode(text.slice(1, t, t + 1)), whole.select(1, t)));
  }
}

}  // namespace

TEST_CASE("Replayed steps read the next tokens in every mixer", "[decoding]") {
  const at::NoGradGuard no_grad;
  constexpr int prompt = 5, steps = 5 * kChunk;
  for (const auto device : devices()) {
    for (const auto& config : decoding_configurations()) {
      for (const int64_t batch : {1, 3}) {
        INFO(name_of(config) << " on " << device << ", batch " << batch);
        auto model = model_on(device, config);
        const auto text = ids(batch, prompt + steps).to(device);
        Counts counts;
        nn::Decoder decode(*model, std::make_unique<CountingRecorder>(counts, nn::make_recorder(text)));
        check_steps(model, decode, text, prompt);
        // The first step of each kind runs eagerly: a token inside a chunk, and a token that ends a chunk.
        const int kinds = has_cat(config) ? 2 : 1;
        CHECK(counts.recorded == kinds);
        CHECK(counts.replayed == steps - kinds);
      }
    }
  }
}

TEST_CASE("Steps after padded prompts are replayed, CAT's by how many chunks end", "[decoding]") {
  const at::NoGradGuard no_grad;
  constexpr int prompt = 6, steps = 3 * kChunk;
  std::set<int> kinds;  // recordings of CAT, by the number of chunks that end in a step
  for (int t = 1; t <= steps; ++t) {
    int ended = 0;
    for (const int length : {6, 6, 6, 3}) ended += (length + t) % kChunk == 0;
    kinds.insert(ended);
  }
  for (const auto device : devices()) {
    for (const auto& config : decoding_configurations()) {
      INFO(name_of(config) << " on " << device);
      auto model = model_on(device, config);
      const auto text = ids(4, prompt + steps).to(device);
      const auto mask =
          at::arange(prompt, text.options()) >= at::tensor({0, 0, 0, 3}, text.options()).unsqueeze(1);
      Counts counts;
      nn::Decoder decode(*model, std::make_unique<CountingRecorder>(counts, nn::make_recorder(text)));
      check_steps(model, decode, text, prompt, mask);
      CHECK(counts.replayed == steps - (has_cat(config) ? int(kinds.size()) : 1));
    }
  }
}

TEST_CASE("The key cache keeps its buffer until it is full; a larger buffer is recorded again",
          "[decoding]") {
  const at::NoGradGuard no_grad;
  constexpr int prompt = 180, steps = 90, slots = 256;
  for (const auto device : devices()) {
    auto config = decoding_configurations()[0];
    config.hybrid = {"attention", "gsa"};
    auto model = model_on(device, config);
    const auto text = ids(2, prompt + steps).to(device);
    Counts counts;
    nn::Decoder decode(*model, std::make_unique<CountingRecorder>(counts, nn::make_recorder(text)));
    const auto keys = [&] { return decode.state().parts[0].tensors[0]; };
    check_steps(model, decode, text.slice(1, 0, slots), prompt);
    CHECK(counts.replayed == slots - prompt - 1);
    CHECK(decode.state().parts[0].tokens == slots);
    CHECK(keys().size(1) == slots);
    const auto whole = model(text).first;
    for (int64_t t = slots; t < text.size(1); ++t) {
      const auto before = keys();
      REQUIRE(close(decode(text.slice(1, t, t + 1)), whole.select(1, t)));
      CHECK(keys().is_same(before) == (t > slots));
    }
    CHECK(keys().size(1) == 2 * slots);
    CHECK(counts.recorded == 2);
    CHECK(counts.replayed == steps - 1 - 2);  // the step that grew the buffer, and the first step after it
  }
}

TEST_CASE("The cache of CAT's headers grows when it is full", "[decoding]") {
  const at::NoGradGuard no_grad;
  for (const auto device : devices()) {
    for (const auto* second : {"", "gsa"}) {
      auto config = decoding_configurations()[0];
      config.mixer = "cat";
      if (*second) config.hybrid = {"cat", second};
      config = with_sizes(config, 5, /*chunk=*/2);
      auto model = model_on(device, config);
      const auto text = ids(2, 90).to(device);
      Counts counts;
      nn::Decoder decode(*model, std::make_unique<CountingRecorder>(counts, nn::make_recorder(text)));
      check_steps(model, decode, text, 7);
      CHECK(counts.recorded > 2);
      CHECK(counts.replayed > 70);
    }
  }
}

TEST_CASE("Two texts of one model are decoded in turn", "[decoding]") {
  const at::NoGradGuard no_grad;
  for (const auto device : devices()) {
    for (const auto& config : decoding_configurations()) {
      INFO(name_of(config) << " on " << device);
      auto model = model_on(device, config);
      std::vector<Tensor> texts, whole;
      std::vector<std::unique_ptr<nn::Decoder>> decoders;
      Counts counts;
      for (const int64_t batch : {2, 1}) {
        texts.push_back(ids(batch, 20).to(device));
        whole.push_back(model(texts.back()).first);
        decoders.push_back(std::make_unique<nn::Decoder>(
            *model, std::make_unique<CountingRecorder>(counts, nn::make_recorder(texts.back()))));
        (*decoders.back())(texts.back().slice(1, 0, 4));
      }
      for (int64_t t = 4; t < 20; ++t) {
        std::vector<Tensor> logits;
        for (size_t i = 0; i < 2; ++i) logits.push_back((*decoders[i])(texts[i].slice(1, t, t + 1)));
        for (size_t i = 0; i < 2; ++i) REQUIRE(close(logits[i], whole[i].select(1, t)));
      }
      CHECK(counts.replayed > 0);
    }
  }
}

TEST_CASE("A step that cannot be recorded runs eagerly, with one warning", "[decoding]") {
  const at::NoGradGuard no_grad;
  for (const auto& config : decoding_configurations()) {
    INFO(name_of(config));
    auto model = model_on(at::kCPU, config);
    nn::Decoder decode(*model, std::make_unique<FailingRecorder>());
    Warnings warnings;
    const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
    check_steps(model, decode, ids(2, 17), 5);
    REQUIRE(warnings.messages.size() == 1);
    CHECK(warnings.messages[0].starts_with(
        "a decoding step cannot be captured as a CUDA graph and runs eagerly: not here"));
  }
}

TEST_CASE("Generated text is the same with and without recorded steps", "[decoding]") {
  const at::NoGradGuard no_grad;
  constexpr int more = 24;
  for (const auto device : devices()) {
    for (const auto& config : decoding_configurations()) {
      for (const int64_t batch : {1, 3}) {
        INFO(name_of(config) << " on " << device << ", batch " << batch);
        auto model = model_on(device, config);
        const auto prompt = ids(batch, 5).to(device);
        nn::Decoder decode(*model, nullptr);
        std::vector<Tensor> text{prompt};
        while (text.size() <= more) text.push_back(decode(text.back()).argmax(-1, true));
        CHECK(model->generate(prompt, {.max_new_tokens = more}).equal(at::cat(text, 1)));

        auto numbers = at::globalContext().defaultGenerator(device);
        numbers.set_current_seed(1);
        nn::Decoder again(*model, nullptr);
        text.resize(1);
        while (text.size() <= more) {
          const auto chances = (again(text.back()).to(at::kFloat) / 1.5).softmax(-1);
          text.push_back(chances.multinomial(1, /*replacement=*/false, numbers));
        }
        numbers.set_current_seed(1);
        const auto sampled =
            model->generate(prompt, {.max_new_tokens = more, .temperature = 1.5, .generator = numbers});
        CHECK(sampled.equal(at::cat(text, 1)));
      }
    }
  }
}

TEST_CASE("Threads generate texts with one model concurrently", "[decoding]") {
  for (const auto device : devices()) {
    for (const auto& config : decoding_configurations()) {
      INFO(name_of(config) << " on " << device);
      auto model = model_on(device, config);
      std::vector<Tensor> prompts, expected, found(3);
      for (int64_t i = 0; i < 3; ++i) {
        prompts.push_back(ids(1 + i, 4 + i).to(device));
        expected.push_back(model->generate(prompts.back(), {.max_new_tokens = 20}));
      }
      std::vector<std::thread> threads;
      for (size_t i = 0; i < 3; ++i) {
        threads.emplace_back([&, i] { found[i] = model->generate(prompts[i], {.max_new_tokens = 20}); });
      }
      for (auto& thread : threads) thread.join();
      for (size_t i = 0; i < 3; ++i) CHECK(found[i].equal(expected[i]));
    }
  }
}

TEST_CASE("Sampling from NaN logits is an error", "[decoding]") {
  for (const auto device : devices()) {
    auto model = model_on(device, decoding_configurations()[0]);
    model->parameters()[0].detach().fill_(NAN);
    CHECK_THROWS_AS(model->generate(ids(2, 5).to(device), {.temperature = 1.0}), c10::Error);
  }
}
