// Layers and language models from C++.
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>
#include <girih/girih.h>
#include <torch/optim/adamw.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>

#include "catch.h"
#include "models.h"

using at::Tensor;
using namespace girih;
using namespace girih::test;

namespace {

bool close(const Tensor& a, const Tensor& b) { return at::allclose(a, b, 1e-9, 1e-9); }

}  // namespace

TEST_CASE("A state continues a sequence in every mixer", "[nn]") {
  const at::NoGradGuard no_grad;
  for (const auto& config : configurations()) {
    INFO(name_of(config));
    auto model = in_double(config);
    const auto text = ids(2, 2 * kChunk + 1);
    const auto whole = model(text).first;
    REQUIRE(whole.sizes() == at::IntArrayRef({2, 2 * kChunk + 1, 11}));
    for (const int64_t split : {1, 3, 4, 6}) {
      auto [a, state] = model(text.slice(1, 0, split), Tensor(), nn::State(), true);
      auto [b, after] = model(text.slice(1, split), Tensor(), state, true);
      CHECK(close(at::cat({a, b}, 1), whole));
    }
    nn::State state;
    for (int64_t t = 0; t < text.size(1); ++t) {
      auto [y, after] = model(text.slice(1, t, t + 1), Tensor(), state, true);
      CHECK(close(y.select(1, 0), whole.select(1, t)));
      state = after;
    }
  }
}

TEST_CASE("Padding has no effect in every mixer", "[nn]") {
  const at::NoGradGuard no_grad;
  for (const auto& config : configurations()) {
    INFO(name_of(config));
    auto model = in_double(config);
    const auto text = ids(2, 2 * kChunk + 1), more = ids(2, 1);
    auto mask = at::ones({2, 2 * kChunk + 1}, at::kLong);
    mask[1].slice(0, 0, 3).fill_(0);
    auto [y, state] = model(text, mask, nn::State(), true);
    auto [alone, alone_state] = model(text.slice(0, 1).slice(1, 3), Tensor(), nn::State(), true);
    CHECK(close(y[1].slice(0, 3), alone[0]));
    const auto next = model(more, Tensor(), state, true).first;
    CHECK(close(next[1], model(more.slice(0, 1), Tensor(), alone_state, true).first[0]));
  }
}

TEST_CASE("Masked tokens have no effect across calls", "[nn]") {
  const at::NoGradGuard no_grad;
  for (const auto& config : configurations()) {
    // Attention's rotary positions count masked tokens.
    if (config.mixer == "attention" || config.mixer == "mag") continue;
    INFO(name_of(config));
    auto model = in_double(config);
    nn::State state;
    std::vector<Tensor> texts, masks, logits;
    for (const int64_t T : {5, 9, 1, 6}) {
      texts.push_back(ids(3, T));
      masks.push_back(at::rand({3, T}) < 0.6);
      auto [y, after] = model(texts.back(), masks.back(), state, true);
      logits.push_back(y);
      state = after;
    }
    const auto text = at::cat(texts, 1), mask = at::cat(masks, 1), y = at::cat(logits, 1);
    for (int64_t i = 0; i < 3; ++i) {
      const auto alone = model(text[i].index({mask[i]}).unsqueeze(0)).first[0];
      CHECK(close(y[i].index({mask[i]}), alone));
    }
  }
}

TEST_CASE("A state is written only when the next state is requested", "[nn]") {
  const at::NoGradGuard no_grad;
  for (const auto& config : configurations()) {
    INFO(name_of(config));
    auto model = in_double(config);
    const auto text = ids(2, kChunk);
    auto [y, state] = model(text.slice(1, 0, kChunk - 1), Tensor(), nn::State(), true);
    const auto last = text.slice(1, kChunk - 1);
    const auto first = model(last, Tensor(), state).first;
    CHECK(close(model(last, Tensor(), state).first, first));
    CHECK(close(model(last, Tensor(), state, true).first, first));
  }
}

TEST_CASE("Rows of a state can be selected and repeated in every mixer", "[nn]") {
  const at::NoGradGuard no_grad;
  const auto order = at::tensor({1, 0, 1});
  const auto select = [&](const Tensor& x) { return x.index_select(0, order); };
  for (const auto& config : configurations()) {
    INFO(name_of(config));
    auto model = in_double(config);
    auto mask = at::ones({2, 5}, at::kLong);
    mask[1][0] = 0;
    for (const auto& padding : {mask, Tensor()}) {
      auto state = model(ids(2, 5), padding, nn::State(), true).second;
      state = model(ids(2, 1), Tensor(), state, true).second;
      auto other = state.map(select);
      for (int step = 0; step < 3; ++step) {
        const auto next = ids(2, 1);
        auto [y, after] = model(next, Tensor(), state, true);
        auto [z, other_after] = model(select(next), Tensor(), other, true);
        CHECK(close(z, select(y)));
        state = after, other = other_after;
      }
    }
  }
}

TEST_CASE("A state of another batch is refused in every mixer", "[nn]") {
  const at::NoGradGuard no_grad;
  for (const auto& config : configurations()) {
    auto model = in_double(config);
    const auto state = model->forward(ids(3, 9), {}, {}, /*use_cache=*/true).second;
    for (const int64_t rows : {1, 2, 4}) {
      for (const int64_t tokens : {1, 5}) {
        INFO(name_of(config) << ", " << rows << " rows of " << tokens << " tokens");
        CHECK_THROWS_WITH(model->forward(ids(rows, tokens), {}, state, true), ContainsSubstring("state"));
      }
    }
  }
}

TEST_CASE("A wrong part of a state is refused before a step writes in every mixer", "[nn]") {
  const at::NoGradGuard no_grad;
  const std::vector<std::function<Tensor(const Tensor&)>> changes = {
      [](const Tensor& t) { return t.to(t.is_floating_point() ? at::kLong : at::kFloat); },
      [](const Tensor& t) {
        return at::cat({t, t.slice(-1, 0, 1)}, -1);
      },
      [](const Tensor& t) { return t.slice(0, 0, 1); }};
  const auto clone = [](const Tensor& t) { return t.clone(); };
  for (const auto& config : configurations()) {
    auto model = in_double(config);
    auto state = model->forward(ids(2, kChunk - 1), {}, {}, /*use_cache=*/true).second;
    const auto token = ids(2, 1);
    const auto count = tensors_of(state).size();
    for (size_t i = 0; i < count; ++i) {
      for (size_t c = 0; c < changes.size(); ++c) {
        INFO(name_of(config) << ", tensor " << i << ", change " << c);
        auto given = state.map(clone);
        auto& part = *tensors_of(given)[i];
        part = changes[c](part);
        auto before = given.map(clone);
        CHECK_THROWS_WITH(model->forward(token, {}, given, true), ContainsSubstring("state"));
        const auto found = tensors_of(given), expected = tensors_of(before);
        for (size_t k = 0; k < count; ++k) CHECK(found[k]->equal(*expected[k]));
      }
    }
    for (size_t i = 0; i < state.parts.size(); ++i) {
      INFO(name_of(config) << ", part " << i);
      auto given = state.map(clone);
      given.parts[i] = {};
      auto before = given.map(clone);
      const auto expected_message = config.is_whole_cat()
                                        ? "state: the keys of layer " + std::to_string(i) + " are missing"
                                        : "state: layer " + std::to_string(i) + " is missing";
      CHECK_THROWS_WITH(model->forward(token, {}, given, true), ContainsSubstring(expected_message));
      const auto found = tensors_of(given), expected = tensors_of(before);
      for (size_t k = 0; k < found.size(); ++k) CHECK(found[k]->equal(*expected[k]));
    }
  }
}

TEST_CASE("A mixture refuses a state without a part of a layer that has a state", "[nn]") {
  const at::NoGradGuard no_grad;
  nn::Attention base(16, 2);
  nn::MixAttention mixture(base.ptr(), nn::DeltaProduct(16, 2).ptr());
  const auto x = at::randn({2, 5, 16}), token = at::randn({2, 1, 16});
  const auto state = mixture->forward(x, {}, {}, true).second;
  for (const size_t i : {0, 1}) {
    auto given = state.map([](const Tensor& t) { return t.clone(); });
    given.parts[i] = {};
    for (const bool use_cache : {true, false})
      CHECK_THROWS_WITH(mixture->forward(token, {}, given, use_cache),
                        ContainsSubstring(i == 0 ? "state: base is missing" : "state: mixer is missing"));
  }
  nn::MixAttention with_activation(nn::ShortConv(16, nn::ShortConvOptions{.kernel_size = 0}).ptr(),
                                   nn::DeltaProduct(16, 2).ptr());
  const auto past = with_activation->forward(x, {}, {}, true).second;
  CHECK(past.parts[0].empty());
  CHECK(with_activation->forward(token, {}, past, true).first.size(1) == 1);
}

TEST_CASE("A short convolution refuses an integer state by name", "[nn]") {
  nn::ShortConv conv(6);
  const auto x = at::randn({2, 1, 6});
  const nn::State state{{at::zeros({2, 3, 6}, at::kInt)}};
  for (const bool use_cache : {true, false})
    CHECK_THROWS_WITH(conv->forward(x, {}, state, use_cache),
                      ContainsSubstring("state: x is Int of shape [2, 3, 6]; expected a floating dtype"));
}

namespace {

// The bytes of CPU memory that this thread has allocated and not freed during the object's lifetime.
class AllocatedBytes : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void*, int64_t size, size_t, size_t, c10::Device) override { bytes += size; }
  bool memoryProfilingEnabled() const override { return true; }

  int64_t bytes = 0;
};

}  // namespace

TEST_CASE("DeltaProduct with several steps does not save the projection beside q, k and v", "[nn]") {
  const int64_t T = 256, width = 64;
  nn::DeltaProduct layer(width, 2, nn::DeltaProductOptions{.n = 2});
  const auto x = at::randn({1, T, width});
  const auto meter = std::make_shared<AllocatedBytes>();
  Tensor y;
  {
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, meter);
    y = layer(x).first;
  }
  // In numbers per token and channel of x: 5 for the input of the convolution, 5 for q, k and v, 3 for the
  // tensors that forward saves, and 1 each for the gate, the operator's output, the norm's output and y. The
  // output of the convolution, in place of q, would make 21 of these 17.
  CHECK(double(meter->bytes) / double(T * width * 4) < 19);
}

TEST_CASE("A state may move between autocast and full precision in every mixer", "[nn]") {
  const at::NoGradGuard no_grad;
  for (const auto& config : configurations()) {
    at::manual_seed(0);
    nn::LanguageModel model(config);
    const auto tokens = ids(3, 19);
    const auto want = model->forward(tokens).first.slice(1, 9);
    for (const bool first : {true, false}) {
      for (const bool then : {true, false}) {
        for (const int64_t step : {1, 5}) {
          INFO(name_of(config) << (first ? ", in autocast" : ", outside")
                               << (then ? ", in autocast" : ", outside") << ", " << step << " tokens a call");
          nn::State state;
          const auto call = [&](int64_t from, int64_t to, bool use_bf16) {
            const nn::Autocast autocast(at::kCPU, at::kBFloat16, use_bf16);
            auto [logits, after] = model->forward(tokens.slice(1, from, to), {}, state, true);
            state = after;
            return logits.to(at::kFloat);
          };
          call(0, 9, first);
          std::vector<Tensor> found;
          for (int64_t at = 9; at < 19; at += step) found.push_back(call(at, at + step, then));
          const auto error = (at::cat(found, 1) - want).norm() / want.norm();
          CHECK(error.item<double>() < 0.1);
        }
      }
    }
  }
}

TEST_CASE("CAT refuses more tokens than it has positions, masked or not", "[nn]") {
  nn::LanguageModel model(nn::Config{.hidden_size = kHidden,
                                     .num_hidden_layers = 1,
                                     .mixer = "cat",
                                     .num_heads = 2,
                                     .chunk = kChunk,
                                     .max_position_embeddings = 2 * kChunk});
  CHECK_NOTHROW(model(ids(1, 2 * kChunk)));
  CHECK_THROWS_AS(model(ids(1, 2 * kChunk + 1)), c10::ValueError);
  CHECK_THROWS_AS(model(ids(1, 2 * kChunk + 1), at::ones({1, 2 * kChunk + 1})), c10::ValueError);
}

TEST_CASE("CAT counts the tokens of all calls against its positions", "[nn]") {
  const at::NoGradGuard no_grad;
  auto model = in_double({.vocab_size = 11,
                          .hidden_size = kHidden,
                          .num_hidden_layers = 1,
                          .mixer = "cat",
                          .num_heads = 2,
                          .chunk = kChunk,
                          .max_position_embeddings = 3 * kChunk});
  nn::State state;
  for (const int64_t T : {5, 1, 4, 1}) state = model(ids(2, T), Tensor(), state, true).second;  // 11 of 12
  CHECK_THROWS_AS(model(ids(2, 2), Tensor(), state, true), c10::ValueError);
  CHECK_THROWS_AS(model(ids(2, 2), at::ones({2, 2}), state, true), c10::ValueError);
  state = model(ids(2, 1), Tensor(), state, true).second;
  CHECK_THROWS_AS(model(ids(2, 1), Tensor(), state, true), c10::ValueError);
}

TEST_CASE("A mask that covers past tokens applies its last columns in every mixer", "[nn]") {
  const at::NoGradGuard no_grad;
  for (const auto& config : configurations()) {
    INFO(name_of(config));
    auto model = in_double(config);
    const auto mask = at::tensor({0, 0, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1}, at::kLong).view({2, 8});
    const auto text = ids(2, 8);
    auto [y, state] = model(text.slice(1, 0, 5), mask.slice(1, 0, 5), nn::State(), true);
    const auto other = state.map([](const Tensor& t) { return t.clone(); });
    const auto own = model(text.slice(1, 5), mask.slice(1, 5), other, true).first;
    const auto whole = model(text.slice(1, 5), mask, state, true).first;
    CHECK(whole.equal(own));
  }
}

TEST_CASE("CAT keeps a slot for each header and for one chunk", "[nn]") {
  const at::NoGradGuard no_grad;
  nn::Config config{.vocab_size = 11,
                    .hidden_size = kHidden,
                    .num_hidden_layers = 2,
                    .mixer = "cat",
                    .num_heads = 2,
                    .chunk = kChunk};
  auto model = in_double(config);
  auto state = model(ids(2, 39 * kChunk), Tensor(), nn::State(), true).second;
  const auto slots = [&] { return state.parts[0].tensors[0].size(1); };
  CHECK(state.parts.size() == 2);
  CHECK(slots() == 48 + kChunk - 1);  // 40 headers, and room for the next
  const auto* at = state.parts[1].tensors[1].data_ptr();
  for (int64_t t = 0; t < 8 * kChunk; ++t) {
    state = model(ids(2, 1), Tensor(), state, true).second;
    CHECK((state.parts[1].tensors[1].data_ptr() == at));
  }
  CHECK(slots() == 48 + kChunk - 1);
  for (int64_t t = 0; t < kChunk; ++t) state = model(ids(2, 1), Tensor(), state, true).second;
  CHECK(slots() == 64 + kChunk - 1);
}

TEST_CASE("Packed sequences equal separate sequences in every mixer", "[nn]") {
  const at::NoGradGuard no_grad;
  for (const auto& config : configurations()) {
    INFO(name_of(config));
    auto model = in_double(config);
    const auto text = ids(1, 3 * kChunk);
    const auto cu = at::tensor({0, 5, 3 * int(kChunk)}, at::kInt);
    const auto packed = model(text, Tensor(), nn::State(), false, cu).first;
    CHECK(close(packed.slice(1, 0, 5), model(text.slice(1, 0, 5)).first));
    CHECK(close(packed.slice(1, 5), model(text.slice(1, 5)).first));
  }
}

TEST_CASE("Every parameter of every mixer has a finite gradient", "[nn]") {
  for (const auto& config : configurations()) {
    auto model = in_double(config);
    model->loss(ids(2, 2 * kChunk + 1)).backward();
    for (const auto& parameter : model->named_parameters()) {
      INFO(name_of(config) << ": " << parameter.key());
      REQUIRE(parameter.value().grad().defined());
      CHECK(at::isfinite(parameter.value().grad()).all().item<bool>());
      CHECK(parameter.value().grad().any().item<bool>());
    }
  }
}

TEST_CASE("Norms, memories and gate biases have no weight decay", "[nn]") {
  nn::LanguageModel model(
      nn::Config{.hidden_size = kHidden, .num_hidden_layers = 1, .mixer = "gla", .num_heads = 2});
  const auto groups = nn::weight_decay_groups(*model);
  const auto names = model->named_parameters();
  const auto has = [&](const std::vector<Tensor>& group, const std::string& name) {
    return std::ranges::any_of(group, [&](const Tensor& x) { return x.is_same(names[name]); });
  };
  CHECK(groups.decayed.size() + groups.undecayed.size() == names.size());
  CHECK(has(groups.undecayed, "model.norm.weight"));
  CHECK(has(groups.undecayed, "model.layers.0.mixer.decay.1.bias"));
  CHECK(has(groups.decayed, "model.layers.0.mixer.decay.1.weight"));
  CHECK(has(groups.decayed, "model.embed_tokens.weight"));
}

TEST_CASE("The last part of a name decides whether a parameter has weight decay in every mixer", "[nn]") {
  const std::set<std::string> undecayed = {"A_log",  "dt_bias",      "bias",         "logit",
                                           "skip",   "header",       "key_memory",   "value_memory",
                                           "memory", "decay_logits", "inner_weight", "inner_bias"};
  auto all = configurations();
  all.push_back(
      with_sizes({.vocab_size = 11, .hidden_size = kHidden, .mixer = "mag", .mag_learned = true}, 5));
  for (const auto& config : all) {
    nn::LanguageModel model(config);
    const auto groups = nn::weight_decay_groups(*model);
    for (const auto& item : model->named_parameters()) {
      const auto& name = item.key();
      INFO(name_of(config) << ": " << name);
      const bool kept = undecayed.contains(name.substr(name.rfind('.') + 1)) || name.ends_with("norm.weight");
      const auto& group = kept ? groups.undecayed : groups.decayed;
      CHECK(std::ranges::any_of(group, [&](const Tensor& x) { return x.is_same(item.value()); }));
    }
    CHECK(groups.decayed.size() + groups.undecayed.size() == model->named_parameters().size());
  }
}

TEST_CASE("Time scales and memories stay in fp32 when a model goes to bf16", "[nn]") {
  const std::set<std::string> kept = {"A_log",      "dt_bias",      "bias",  "logit",
                                      "key_memory", "value_memory", "memory"};
  nn::LanguageModel model(nn::Config{.hidden_size = kHidden,
                                     .num_hidden_layers = 5,
                                     .hybrid = {"gla", "mamba2", "trellis", "lattice", "mag"},
                                     .num_heads = 2,
                                     .mag_learned = true});
  std::map<std::string, Tensor> before;
  for (const auto& item : model->named_parameters()) before[item.key()] = item.value().detach().clone();
  model->to(at::kBFloat16);
  size_t found = 0;
  for (const auto& item : model->named_parameters()) {
    const bool keeps = kept.contains(item.key().substr(item.key().rfind('.') + 1)) &&
                       !item.key().ends_with("conv.bias");  // the bias of a convolution is not a gate bias
    found += keeps;
    INFO(item.key());
    CHECK(item.value().scalar_type() == (keeps ? at::kFloat : at::kBFloat16));
    if (keeps) CHECK(item.value().equal(before[item.key()]));
  }
  CHECK(found == 15);  // gla 1, mamba2 2, trellis 5, lattice 4, mag 3 (its logit, and 2 of its mixer)
  CHECK(at::isfinite(model->forward(ids(1, 2 * kChunk)).first).all().item<bool>());
  model->to(at::kDouble);
  for (const auto& p : model->parameters()) CHECK(p.scalar_type() == at::kDouble);
}

TEST_CASE("A device and a dtype keep time scales and memories in fp32 too", "[nn]") {
  nn::LanguageModel model(nn::Config{
      .hidden_size = kHidden, .num_hidden_layers = 2, .hybrid = {"trellis", "mamba2"}, .num_heads = 2});
  for (const auto dtype : {at::kHalf, at::kBFloat16}) {
    model->to(at::kCPU, dtype);
    size_t kept = 0;
    for (const auto& item : model->named_parameters()) {
      const auto name = item.key().substr(item.key().rfind('.') + 1);
      const bool keeps = name == "A_log" || name == "dt_bias" || name.ends_with("_memory") ||
                         item.key().ends_with("gamma_proj.bias");
      kept += keeps;
      INFO(item.key());
      CHECK(item.value().scalar_type() == (keeps ? at::kFloat : dtype));
    }
    CHECK(kept == 7);  // trellis: A_log, dt_bias, the bias of gamma, two memories; mamba2: A_log, dt_bias
  }
}

TEST_CASE("A model trained for a few steps learns and generates its text", "[nn]") {
  at::manual_seed(0);
  nn::LanguageModel model(
      nn::Config{.vocab_size = 8, .hidden_size = 32, .num_hidden_layers = 1, .num_heads = 2, .num_slots = 8});
  const auto text = at::arange(24).remainder(6).unsqueeze(0).repeat({4, 1});
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
  const double before = model->loss(text).item<double>();
  for (int step = 0; step < 40; ++step) {
    optimizer.zero_grad();
    model->loss(text).backward();
    optimizer.step();
  }
  const double after = model->loss(text).item<double>();
  INFO("loss " << before << " -> " << after);
  CHECK(after < 0.1 * before);
  const auto generated = model->generate(text.slice(0, 0, 1).slice(1, 0, 12), {.max_new_tokens = 12});
  CHECK(generated.equal(text.slice(0, 0, 1)));
}

TEST_CASE("generate returns the most likely tokens, with the state as its cache", "[nn]") {
  const at::NoGradGuard no_grad;
  for (const auto& config : configurations()) {
    INFO(name_of(config));
    auto model = in_double(config);
    auto text = ids(2, 5);
    const auto generated = model->generate(text, {.max_new_tokens = 6});
    for (int i = 0; i < 6; ++i) {
      text = at::cat({text, model(text).first.select(1, -1).argmax(-1, true)}, 1);
    }
    CHECK(generated.equal(text));
  }
}

TEST_CASE("generate samples among the top tokens and stops at the end token", "[nn]") {
  auto model = in_double(configurations()[0]);
  const auto prompt = ids(3, 4);
  const auto greedy = model->generate(prompt, {.max_new_tokens = 5});
  CHECK(model->generate(prompt, {.max_new_tokens = 5, .temperature = 1.0, .top_k = 1}).equal(greedy));
  const auto sampled = model->generate(prompt, {.max_new_tokens = 5, .temperature = 1.0});
  CHECK(sampled.sizes() == at::IntArrayRef({3, 9}));
  const auto end = greedy[0][4].item<int64_t>();
  const auto ended = model->generate(prompt, {.max_new_tokens = 5, .eos_token_id = end});
  CHECK((ended[0].slice(0, 4) == end).all().item<bool>());
  CHECK_THROWS_AS(model->generate(prompt, {.temperature = -1.0}), c10::ValueError);
}

TEST_CASE("A low temperature selects the most likely token, a high temperature any token", "[nn]") {
  auto model = in_double(configurations()[0]);
  const auto prompt = ids(1, 4).expand({64, 4});
  const auto first = [&](double temperature) {
    return model->generate(prompt, {.max_new_tokens = 1, .temperature = temperature}).select(1, -1);
  };
  CHECK(first(1e-6).equal(first(0)));
  CHECK(std::get<0>(at::_unique(first(1e6))).numel() > 8);  // of 11; 64 draws miss 3 with probability 10^-5
}

TEST_CASE("A finished row repeats the end token while other rows continue", "[nn]") {
  constexpr int64_t prompt = 4, more = 12;
  auto config = configurations()[0];
  config.initializer_range = 1.0;  // smaller weights repeat one token
  auto model = in_double(config);
  const auto text = ids(8, prompt);
  const auto unlimited = model->generate(text, {.max_new_tokens = more}).slice(1, prompt);
  const auto end = unlimited[0][2].item<int64_t>();
  const auto at_end = unlimited == end;
  const auto ended = at_end.cumsum(1) - at_end.to(at::kLong) > 0;  // after the first end of the row
  REQUIRE((unlimited != end).logical_and(ended)[0].any().item<bool>());
  REQUIRE(!at_end.any(1).all().item<bool>());
  const auto generated = model->generate(text, {.max_new_tokens = more, .eos_token_id = end});
  CHECK(generated.slice(1, prompt).equal(unlimited.masked_fill(ended, end)));
}

TEST_CASE("generate uses the given generator and leaves the default generator unchanged", "[nn]") {
  auto config = configurations()[0];
  config.initializer_range = 0.2;
  auto model = in_double(config);
  const auto prompt = ids(2, 5);
  const auto sample = [&](uint64_t seed, uint64_t default_seed) {
    at::manual_seed(default_seed);
    const auto text = model->generate(prompt, {.max_new_tokens = 24,
                                               .temperature = 1.5,
                                               .generator = at::make_generator<at::CPUGeneratorImpl>(seed)});
    const auto next = at::rand({4});
    at::manual_seed(default_seed);
    CHECK(next.equal(at::rand({4})));
    return text;
  };
  const auto text = sample(1, 7);
  CHECK(sample(1, 8).equal(text));
  CHECK(!sample(2, 7).equal(text));
}

TEST_CASE("A saved model is loaded unchanged", "[nn]") {
  const auto folder =
      std::filesystem::temp_directory_path() / ("girih_saved_model_" + std::to_string(getpid()));
  for (const auto& config : configurations()) {
    INFO(name_of(config));
    auto model = in_double(config);
    model->save_pretrained(folder.string());
    auto loaded = nn::from_pretrained(folder.string());
    const auto text = ids(2, 7);
    CHECK(loaded(text).first.equal(model(text).first));
    CHECK(loaded->config.mixers() == config.mixers());
  }
  // Modules created after loading are initialised again.
  const nn::SwiGLU fresh(64, 64);
  const auto bound = fresh->up_proj->weight.abs().max().item<double>();
  CHECK((bound > 0.12 && bound <= 0.125));
  const auto file = folder / "model.safetensors", config = folder / "config.json";
  std::ofstream(file, std::ios::in | std::ios::out).seekp(0) << "cut off!";
  CHECK_THROWS_AS(nn::from_pretrained(folder.string()), std::runtime_error);
  for (const auto& path : {file, config, folder}) {
    REQUIRE(std::remove(path.c_str()) == 0);
    CHECK_THROWS_AS(nn::from_pretrained(folder.string()), std::runtime_error);
  }
  CHECK_THROWS_AS(in_double(configurations()[0])->save_pretrained("/proc/nowhere"), std::exception);
}

TEST_CASE("Tokens may be int32", "[nn]") {
  for (const auto& config : configurations()) {
    INFO(name_of(config));
    auto model = in_double(config);
    const auto text = ids(2, 9), narrow = text.to(at::kInt);
    CHECK(model->loss(narrow).equal(model->loss(text)));
    CHECK(model->loss(text, narrow).equal(model->loss(text)));
    CHECK(model->generate(narrow, {.max_new_tokens = 6}).equal(model->generate(text, {.max_new_tokens = 6})));
  }
}

TEST_CASE("Wrong configurations and arguments are refused by name", "[nn]") {
  const auto message = [](const auto& call) -> std::string {
    try {
      call();
    } catch (const c10::ValueError& error) {
      return error.what_without_backtrace();
    }
    return "nothing was thrown";
  };
  const auto check_config_refused = [&](const nn::Config& config, const std::string& words) {
    const auto text = message([&] { nn::LanguageModel model(config); });
    INFO(text);
    CHECK(text.find(words) != std::string::npos);
  };
  check_config_refused({.mixer = "lstm"}, "mixer is 'lstm'");
  check_config_refused({.num_hidden_layers = 2, .hybrid = {"gsa"}}, "mixer names 1 layers");
  check_config_refused({.num_hidden_layers = 2, .hybrid = {"gsa", "gsa", "gsa"}}, "mixer names 3 layers");
  check_config_refused({.hidden_size = 30}, "num_heads is 4");
  check_config_refused({.mixer = "lattice", .phi = "identity"},
                       "phi is \"identity\", which mixer lattice does not read");
  check_config_refused({.num_hidden_layers = 2, .hybrid = {"gsa", "attention"}, .chunk = 8},
                       "chunk is 8, which mixers attention, gsa do not read; expected its default, 16");
  check_config_refused({.mixer = "deltanet", .chunk = 8}, "chunk is 8, which mixer deltanet does not read");
  check_config_refused({.mixer = "lattice", .normalize = false},
                       "normalize is false, so chunk should be 1 but is 16");
  check_config_refused({.mixer = "lattice", .shrinkage = 0.1},
                       "shrinkage is 0.1, so chunk should be 1 but is 16");
  check_config_refused({.mixer = "trellis", .chunk = 65}, "chunk is 65; expected 1 to 64 for trellis");
  check_config_refused({.num_kv_heads = 0}, "num_kv_heads is 0");
  check_config_refused({.head_dim = 0}, "head_dim is 0");
  check_config_refused({.num_kv_heads = 3}, "num_kv_heads is 3");
  check_config_refused({.feature = "sine"}, "feature is 'sine'");
  const auto text = message([] { nn::Config::from_json(R"({"hidden_size": "wide"})"); });
  INFO(text);
  CHECK(text.find("hidden_size is \"wide\"") != std::string::npos);
  const auto misspelt = message([] { nn::Config::from_json(R"({"num_slotz": 3, "torch_dtype": "x"})"); });
  INFO(misspelt);
  CHECK(misspelt.find("num_slotz is not a field of a configuration; did you mean num_slots?") !=
        std::string::npos);

  const auto check_refused = [&](const auto& make, const std::string& words) {
    const auto text = message(make);
    INFO(text);
    CHECK(text.find(words) != std::string::npos);
  };
  check_refused([] { nn::GatedSlotAttention(16, 0); }, "num_heads is 0");
  check_refused([] { nn::GatedSlotAttention(15, 2); },
                "num_heads is 2, which does not divide hidden_size 15");
  check_refused([] { nn::GatedSlotAttention(16, 2, nn::GatedSlotAttentionOptions{.num_slots = 0}); },
                "num_slots is 0");
  check_refused([] { nn::GatedSlotAttention(16, 2, nn::GatedSlotAttentionOptions{.feature = "sine"}); },
                "feature is 'sine'");
  check_refused([] { nn::GatedLinearAttention(16, 2, nn::GatedLinearAttentionOptions{.num_kv_heads = 3}); },
                "num_kv_heads is 3");
  check_refused([] { nn::GatedLinearAttention(16, 2, nn::GatedLinearAttentionOptions{.expand_k = 0.3}); },
                "expand_k is 0.3 and head_dim is 8, which makes 2.4 channels; expected a whole number");
  check_refused([] { nn::GatedLinearAttention(16, 2, nn::GatedLinearAttentionOptions{.rope_theta = 500}); },
                "rope_theta is 500; expected none: it is for rotary");
  check_refused([] { nn::Config{.mixer = "mamba2", .num_kv_heads = 2}.completed(); },
                "num_kv_heads is 2; mamba2 has no groups of queries: expected num_heads, 4");
  check_refused([] { nn::Mamba2(16, 2, nn::Mamba2Options{.expand_v = 0.75}); },
                "expand_v is 0.75 and num_heads is 2, which makes 1.5 heads of mamba2");
  check_refused([] { nn::Raven(16, 2, nn::RavenOptions{.num_slots = 4, .topk = 5}); },
                "topk is 5; expected 1 to num_slots, 4");
  check_refused([] { nn::Raven(16, 2, nn::RavenOptions{.router_score = "tanh"}); }, "router_score is 'tanh'");
  check_refused([] { nn::GatedDeltaProduct(16, 4, nn::GatedDeltaProductOptions{.num_groups = 3}); },
                "num_groups is 3; expected a divisor of num_heads, 4");
  check_refused([] { nn::HGRN2(16, 2, nn::HGRN2Options{.lower_bound = 1}); }, "lower_bound is 1");
  check_refused([] { nn::DeltaProduct(16, 2, nn::DeltaProductOptions{.n = 0}); }, "n is 0");
  check_refused([] { nn::DeltaProduct(16, 2, nn::DeltaProductOptions{.conv_size = -1}); }, "conv_size is -1");
  check_refused(
      [] { nn::DeltaProduct(16, 2, nn::DeltaProductOptions{.between_chunks = "relu", .chunk = 4}); },
      "between_chunks is 'relu'");
  check_refused([] { nn::DeltaProduct(16, 2, nn::DeltaProductOptions{.between_chunks = "gelu"}); },
                "chunk is None; expected 1 to 64 with between_chunks");
  check_refused(
      [] { nn::DeltaProduct(16, 2, nn::DeltaProductOptions{.between_chunks = "gelu", .chunk = 65}); },
      "chunk is 65; expected 1 to 64 for between_chunks");
  check_refused(
      [] { nn::DeltaProduct(16, 2, nn::DeltaProductOptions{.between_chunks = "gelu", .chunk = 0}); },
      "chunk is 0; expected 1 to 64 for between_chunks");
  check_refused(
      [] { nn::DeltaProduct(16, 2, nn::DeltaProductOptions{.between_chunks = "gelu", .chunk = 257}); },
      "chunk is 257; expected 1 to 64 for between_chunks");
  check_refused([] { nn::DeltaProduct(16, 2, nn::DeltaProductOptions{.chunk = 4}); },
                "chunk is 4; expected none: it is for between_chunks");
  check_refused([] { nn::Attention(16, 2, nn::AttentionOptions{.causal = false, .window = 4}); },
                "window is 4; expected none where causal is false");
  check_refused([] { nn::Attention(16, 2, nn::AttentionOptions{.window = 0}); }, "window is 0");
  check_refused(
      [] {
        nn::GatedSlotAttention(16, 2,
                               nn::GatedSlotAttentionOptions{.gated = false, .data_dependent_decay = false});
      },
      "data_dependent_decay is false");
  check_refused([] { nn::Trellis(16, 2, nn::TrellisOptions{.value_read = "f"}); }, "value_read is 'f'");
  check_refused([] { nn::Trellis(16, 2, nn::TrellisOptions{.chunk = 65}); },
                "chunk is 65; expected 1 to 64 for trellis");
  check_refused([] { nn::Trellis(16, 2, nn::TrellisOptions{.phi = "gelu"}); }, "phi is 'gelu'");
  check_refused([] { nn::Lattice(16, 2, nn::LatticeOptions{.objective = "x"}); }, "objective is 'x'");
  check_refused([] { nn::Attention(16, 2, nn::AttentionOptions{.head_dim = 7}); }, "head_dim is 7");
  check_refused([] { nn::ChunkAttention(16, 0); }, "num_heads is 0");
  check_refused([] { nn::ShortConv(16, nn::ShortConvOptions{.kernel_size = -1}); },
                "kernel_size is -1; expected 0 to ");
  check_refused([] { nn::ShortConv(16, nn::ShortConvOptions{.activation = "gelu"}); },
                "activation is 'gelu'");
  check_refused([] { nn::GatedRMSNorm(16, 1e-6, "tanh"); },
                "activation is 'tanh'; expected one of silu, gelu, sigmoid");
  check_refused([] { nn::CompressAttend(16, 2, nn::ChunkAttentionOptions{.chunk = 0}); }, "chunk is 0");

  auto model = in_double(configurations()[0]);
  const auto mask = at::ones({1, 4}, at::kLong), cu = at::tensor({0, 4}, at::kInt);
  CHECK_THROWS_AS(model(ids(1, 4), mask, nn::State(), false, cu), c10::ValueError);

  const auto tokens = ids(1, 4);
  check_refused([&] { model->loss(tokens.to(at::kFloat)); },
                "ids is Float of shape [1, 4]; expected int64 or int32");
  check_refused([&] { model->generate(tokens.to(at::kByte)); }, "ids is Byte of shape [1, 4]");
  check_refused([&] { model(tokens[0]); },
                "ids is Long of shape [4]; expected int64 or int32, [batch, tokens]");
  check_refused([&] { model->loss(tokens, tokens.to(at::kFloat)); }, "labels is Float");
}

TEST_CASE("Default values of options", "[nn]") {
  const nn::GatedDeltaProductOptions grouped;
  CHECK((grouped.n == 2 && grouped.num_groups == 1 && grouped.state_size == 128 && grouped.conv_size == 4 &&
         grouped.norm_eps == 1e-6));
  const nn::RavenOptions raven;
  CHECK((raven.num_slots == 64 && !raven.topk && !raven.slot_decay && raven.gate_logit_normalizer == 8 &&
         raven.router_score == "sigmoid" && !raven.router_mlp && !raven.router_bias && !raven.router_noise &&
         !raven.output_gate && raven.norm_eps == 1e-6));
  const nn::GatedSlotAttentionOptions gsa;
  CHECK((gsa.num_slots == 64 && gsa.gated && gsa.data_dependent_decay && gsa.gate_logit_normalizer == 8 &&
         gsa.feature == "softmax" && gsa.conv_size == 0 && gsa.norm_eps == 1e-6));
  const nn::GatedLinearAttentionOptions gla;
  CHECK((gla.gate == "vector" && gla.gate_low_rank == 16 && gla.gate_logit_normalizer == 16 &&
         gla.conv_size == 0 && gla.norm_eps == 1e-6));
  const nn::DeltaProductOptions delta;
  CHECK((delta.n == 1 && !delta.gated && !delta.allow_neg_eigval && !delta.between_chunks && !delta.chunk &&
         delta.conv_size == 4 && delta.norm_eps == 1e-6));
  const nn::TrellisOptions trellis;
  CHECK((trellis.num_slots == 64 && trellis.chunk == 16 && trellis.phi == "ln_silu" &&
         trellis.f == "ln_silu" && trellis.gated && !trellis.shared_qk && trellis.normalize_kv &&
         trellis.value_read == "linear" && trellis.post_norm && trellis.conv_size == 4 &&
         trellis.norm_eps == 1e-6));
  const nn::TTTLinearOptions ttt;
  CHECK((ttt.chunk == 16 && ttt.conv_size == 4 && ttt.norm_eps == 1e-6));
  const nn::LatticeOptions lattice;
  CHECK((lattice.num_slots == 64 && lattice.chunk == 16 && lattice.objective == "decode" && lattice.gated &&
         lattice.normalize && lattice.shrinkage == 0 && !lattice.post_norm && lattice.conv_size == 4 &&
         lattice.norm_eps == 1e-6));
  const nn::AttentionOptions attention;
  CHECK((attention.rope_theta == 1e4 && attention.causal && !attention.window));
  const nn::ChunkAttentionOptions cat;
  CHECK((cat.chunk == 16 && cat.rope_theta == 1e4 && !cat.running_positions));
  const nn::ShortConvOptions conv;
  CHECK((conv.kernel_size == 4 && conv.activation == "silu" && !conv.bias));
  const nn::MixAttentionOptions mixture;
  CHECK((mixture.weight == 0.5 && !mixture.learned && !mixture.cross));
  const nn::LinearPathOptions path;
  CHECK((path.n == 2 && path.virtual_tokens == "derivative" && path.gate == "k" &&
         path.gate_per == "channel" && path.pool == "past" && !path.between_chunks && path.chunk == 64 &&
         path.norm_eps == 1e-6));
  CHECK_FALSE(nn::Injection{}.layers);
  const nn::GenerateOptions generate;
  CHECK((generate.max_new_tokens == 64 && generate.temperature == 0 && !generate.top_k && !generate.top_p &&
         !generate.generator && !generate.eos_token_id));
  CHECK(nn::DecayGate(8, 2)->largest_step == 0.1);
  CHECK((nn::RMSNorm(8)->eps == 1e-6 && nn::GatedRMSNorm(8)->eps == 1e-6));
  CHECK(nn::GatedRMSNorm(8)->activation == "silu");
  for (const auto& heads :
       {nn::Attention(24, 3)->options.num_kv_heads, nn::DeltaProduct(24, 3)->options.num_kv_heads,
        nn::GatedSlotAttention(24, 3)->options.num_kv_heads})
    CHECK(heads == 3);
  for (const auto& width : {nn::Attention(24, 3)->options.head_dim, nn::Trellis(24, 3)->options.head_dim,
                            nn::Lattice(24, 3)->options.head_dim})
    CHECK(width == 8);

  CHECK((ops::GSAOptions().feature == "softmax" && !ops::GSAOptions().scale));
  CHECK((!ops::GLAOptions().scale && !ops::DeltaProductOptions().scale && !ops::CatAttentionOptions().scale));
  const ops::DeltaProductOptions rule;
  CHECK((!rule.n && !rule.l2norm_qk && !rule.chunk && !rule.between_chunks));
  CHECK((ops::TrellisOptions().phi == "ln_silu" && ops::TrellisOptions().f == "ln_silu"));
  CHECK((ops::TTTOptions().phi == "layer_norm" && ops::TTTOptions().f == "identity"));
  const ops::LatticeOptions columns;
  CHECK((columns.objective == "decode" && columns.normalize && columns.shrinkage == 0));
  CHECK(!ops::ShortConvOptions().activation);
  CHECK((ops::GatedRMSNormOptions().activation == "silu" && ops::GatedRMSNormOptions().eps == 1e-6));
}
