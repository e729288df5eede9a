// LiZA: the linear path on an attention's q, k and v, its mixture with attention, and schedules of the
// weight.
#include <girih/girih.h>

#include <cmath>
#include <numbers>

#include "catch.h"
#include "models.h"

using at::Tensor;
using namespace girih;
using namespace girih::test;

namespace {

constexpr int64_t kHeads = 4, kMemories = 2, kWidth = 6, kTokens = 11;

std::vector<nn::LinearPathOptions> paths() {
  return {{},
          {.n = 1, .gate = "v"},
          {.n = 4, .gate = "kv", .pool = "window"},
          {.n = 3, .virtual_tokens = "rotary", .gate_per = "head"},
          {.n = 3, .virtual_tokens = "both", .between_chunks = "tanh", .chunk = 4, .norm_eps = 0.3},
          {.between_chunks = "gelu", .chunk = 3}};
}

nn::LinearPath path_of(const nn::LinearPathOptions& options) {
  at::manual_seed(0);
  nn::LinearPath path(kHeads, kMemories, kWidth, options);
  path->norm->weight.detach().normal_();
  path->to(at::kDouble);
  return path;
}

Tensor qkv(int64_t rows) {
  return at::randn({rows, kTokens, (kHeads + 2 * kMemories) * kWidth}, at::kDouble);
}

// The equations for one row, x [T, heads + 2 kv_heads, head_dim], token by token: TPTT, eq. 4, 5, 6, 16, 22,
// 23, 24.
Tensor compute_equations(const nn::LinearPath& path, const Tensor& x) {
  const auto& o = path->options;
  const auto unit = [&](int64_t t, int64_t column) {
    if (t < 0) return at::zeros({kWidth}, at::kDouble);
    const auto y = at::silu(x[t][column]);
    return y / y.norm();
  };
  const auto gate = [&](int64_t t, int64_t column) {
    const auto from = o.pool == "past" ? 0 : std::max<int64_t>(t - 2, 0);
    const auto sum = x.select(1, column).slice(0, from, t + 1).sum(0);
    return (sum / (o.pool == "past" ? double(t + 1) : 3.0)).sigmoid();
  };
  const auto virtual_token = [&](int64_t t, int64_t column, int64_t m) {
    auto difference = at::zeros({kWidth}, at::kDouble);
    double binomial = 1;
    for (int64_t k = 0; k <= m; ++k) {
      difference = difference + binomial * unit(t - k, column);
      binomial *= -double(m - k) / double(k + 1);
    }
    difference = difference / std::exp2(double(m));
    const double angle = 2 * std::numbers::pi * double(m) / double(o.n);
    auto rotated = unit(t, column).clone();
    for (int64_t i = 0; i < kWidth; i += 2) {
      const auto a = unit(t, column)[i], b = unit(t, column)[i + 1];
      rotated[i] = a * std::cos(angle) - b * std::sin(angle);
      rotated[i + 1] = a * std::sin(angle) + b * std::cos(angle);
    }
    if (o.virtual_tokens == "both") return (difference + rotated) / 2;
    return o.virtual_tokens == "derivative" ? difference : rotated;
  };
  std::vector<Tensor> rows;
  for (int64_t head = 0; head < kHeads; ++head) {
    const auto memory = head / (kHeads / kMemories), k = kHeads + memory, v = k + kMemories;
    auto S = at::zeros({kWidth, kWidth}, at::kDouble);
    std::vector<Tensor> reads;
    for (int64_t t = 0; t < x.size(0); ++t) {
      auto beta = o.gate == "k" ? gate(t, k) : o.gate == "v" ? gate(t, v) : gate(t, k) * gate(t, v);
      if (o.gate_per == "head") beta = beta.mean().expand({kWidth});
      for (int64_t m = 0; m < o.n; ++m) {
        const auto key = virtual_token(t, k, m), value = virtual_token(t, v, m);
        S = S + at::outer(key, beta * value - at::mv(S.t(), beta * key));
      }
      const auto out = at::mv(S.t(), unit(t, head));
      reads.push_back(out / (out.square().mean() + o.norm_eps).sqrt() * path->norm->weight);
      if (o.between_chunks && (t + 1) % o.chunk == 0)
        S = *o.between_chunks == "tanh" ? S.tanh() : at::gelu(S);
    }
    rows.push_back(at::stack(reads));
  }
  return at::cat(rows, -1);
}

bool close(const Tensor& a, const Tensor& b) { return at::allclose(a, b, 1e-9, 1e-9); }

}  // namespace

TEST_CASE("A linear path computes its equations", "[nn]") {
  const at::NoGradGuard no_grad;
  for (const auto& options : paths()) {
    auto path = path_of(options);
    const auto x = qkv(2), y = path(x).first;
    for (int64_t row = 0; row < 2; ++row)
      CHECK(close(y[row], compute_equations(path, x[row].view({kTokens, -1, kWidth}))));
  }
}

TEST_CASE("A linear path's state continues it over calls of any length, with and without gradients", "[nn]") {
  for (const auto& options : paths()) {
    auto path = path_of(options);
    const auto x = qkv(2), whole = path(x).first.detach();
    for (const bool grad : {true, false}) {
      const at::AutoGradMode mode(grad);
      for (const int64_t piece : {1, 2, 4}) {
        nn::State state;
        std::vector<Tensor> parts;
        for (int64_t t = 0; t < kTokens; t += piece) {
          auto [y, after] = path(x.slice(1, t, std::min(t + piece, kTokens)), Tensor(), state, true);
          parts.push_back(y);
          state = after;
        }
        CHECK(close(at::cat(parts, 1), whole));
      }
    }
  }
}

TEST_CASE("An injected model shares the model's weights, and has its logits at weight 0", "[nn]") {
  const auto text = ids(2, 9);
  nn::Config config{.vocab_size = 11, .hidden_size = kHidden, .num_hidden_layers = 2, .num_heads = 2};
  config.mixer = "attention";
  config.initializer_range = 0.3;
  auto model = in_double(config);
  model->eval();
  auto injected = nn::inject(model, {.layers = std::vector<int64_t>{1}, .mix = {.weight = 0}});
  CHECK(!injected->is_training());
  CHECK(injected->config.injections.size() == 1);
  CHECK(model->config.injections.empty());
  CHECK(injected(text).first.equal(model(text).first));
  const auto own = injected->named_parameters();
  CHECK(own.size() == model->named_parameters().size() + 1);
  CHECK(own["model.layers.1.mixer.girih.path.norm.weight"].scalar_type() == at::kDouble);
  for (const auto& item : model->named_parameters())
    CHECK(own[item.key()].data_ptr() == item.value().data_ptr());

  nn::MixSchedule("gradual", {.first = 0.0, .final = 0.6, .steps = 4}).set_weights(*injected, 3);
  CHECK(std::abs(injected->named_buffers()["model.layers.1.mixer.girih.weight"].item<double>() - 0.45) <
        1e-12);
  CHECK(!close(injected(text).first, model(text).first));
  auto twice = nn::inject(injected, {.layers = std::vector<int64_t>{0}, .mix = {.learned = true}});
  CHECK(twice->named_buffers()["model.layers.1.mixer.girih.weight"].item<double>() > 0.4);
  CHECK_THROWS_WITH(nn::MixSchedule().set_weights(*twice, 0),
                    ContainsSubstring("is learned by this mixture"));
  auto other = nn::inject(nn::inject(model, {.layers = std::vector<int64_t>{0}}),
                          {.layers = std::vector<int64_t>{1}, .mix = {.learned = true}});
  CHECK_THROWS_WITH(nn::MixSchedule("constant", {.final = 0.25}).set_weights(*other, 0),
                    ContainsSubstring("is learned by this mixture"));
  CHECK(other->named_buffers()["model.layers.0.mixer.girih.weight"].item<double>() == 0.5);  // not changed
  model->parameters()[0].set_requires_grad(false);
  CHECK(!nn::inject(model)->parameters()[0].requires_grad());
  CHECK_THROWS_WITH(nn::MixSchedule().set_weights(*model, 0), ContainsSubstring("has no mixture"));
  CHECK_THROWS_WITH(nn::inject(twice), ContainsSubstring("has a linear path already"));
}

TEST_CASE("Invalid options of a linear path are refused by name", "[nn]") {
  const auto path = [](const nn::LinearPathOptions& options, int64_t width = kWidth) {
    nn::LinearPath(kHeads, kMemories, width, options);
  };
  CHECK_THROWS_WITH(path({.n = 5}), ContainsSubstring("n is 5; expected 1 to 4"));
  CHECK_THROWS_WITH(path({.gate = "q"}), ContainsSubstring("gate is 'q'; expected one of k, v, kv"));
  CHECK_THROWS_WITH(path({.chunk = 8}), ContainsSubstring("chunk is 8; expected none"));
  CHECK_THROWS_WITH(
      path({.virtual_tokens = "rotary"}, 7),
      ContainsSubstring("virtual_tokens is rotary, which turns pairs of channels; heads have 7"));
  CHECK_THROWS_WITH(path({.n = 1, .virtual_tokens = "rotary"}),
                    ContainsSubstring("virtual_tokens is rotary; expected none: it is for n above 1"));
  CHECK_THROWS_WITH(nn::InjectedAttention(kHidden, 2, nn::AttentionOptions{.causal = false}),
                    ContainsSubstring("causal is false"));
  nn::Config config{.vocab_size = 11, .hidden_size = kHidden, .mixer = "mag", .num_heads = 2};
  config.injections = {nn::Injection{}};
  CHECK_THROWS_WITH(nn::LanguageModel(config),
                    ContainsSubstring("the model has no attention to inject into"));
  config.mixer = "attention";
  config.injections = {nn::Injection{.layers = std::vector<int64_t>{}}};
  CHECK_THROWS_WITH(nn::LanguageModel(config),
                    ContainsSubstring("girih.layers is an empty list; expected one index at least"));
}

TEST_CASE("The weight of a mixture must be a number from 0 to 1", "[nn]") {
  nn::Liza liza(nn::LinearPath(kHeads, kMemories, kWidth));
  for (const double wrong : {-0.25, 1.5, double(NAN)})
    CHECK_THROWS_WITH(liza->set_weight(wrong), ContainsSubstring("expected a number from 0 to 1"));
  CHECK_THROWS_WITH(liza->set_weight(1.5), ContainsSubstring("weight is 1.5"));
  CHECK(liza->weight.item<double>() == 0.5);
  for (const double right : {0.0, 1.0}) {
    liza->set_weight(right);
    CHECK(liza->weight.item<double>() == right);
  }
}

TEST_CASE("An invalid state of an injected layer is refused before any tensor is written", "[nn]") {
  const at::NoGradGuard no_grad;
  for (const auto& options : paths()) {
    nn::InjectedAttention layer(kHidden, 2, nn::AttentionOptions{}, options);
    const auto x = at::randn({2, 5, kHidden});
    auto state = layer(x, Tensor(), nn::State(), true).second;
    const auto copy = state.map([](const Tensor& t) { return t.clone(); });
    const auto token = x.slice(1, 0, 1);
    const auto count = tensors_of(state).size();
    for (size_t i = 0; i < count; ++i) {
      for (const bool shorter : {true, false}) {
        auto wrong = state;
        auto& part = *tensors_of(wrong)[i];
        // A missing sequence, or an integer dtype.
        part = shorter ? part.slice(0, 0, 1) : part.to(at::kInt);
        CHECK_THROWS_AS(layer(token, Tensor(), wrong, true), c10::ValueError);
      }
    }
    for (const size_t side : {0, 1}) {
      auto wrong = state;
      auto& parts = side == 0 ? wrong.parts : wrong.parts[1].parts;
      parts.pop_back();
      CHECK_THROWS_AS(layer(token, Tensor(), wrong, true), c10::ValueError);
    }
    auto before = copy;
    const auto found = tensors_of(state), expected = tensors_of(before);
    for (size_t i = 0; i < count; ++i) CHECK(found[i]->equal(*expected[i]));
  }
}

TEST_CASE("Step sizes under autocast do not overflow in fp16", "[nn]") {
  const at::NoGradGuard no_grad;
  nn::LinearPath path(kHeads, kMemories, kWidth, nn::LinearPathOptions{.n = 1});
  const auto x = qkv(1).to(at::kFloat).slice(1, 0, 1);
  // After 70000 keys of mean 1 beta is sigmoid(1); the sum of the keys overflows fp16.
  auto state = path(x, Tensor(), nn::State(), true).second;
  state.tensors[0].fill_(70000);
  state.parts[0].tensors[0].fill_(70000);
  state.parts[1].tensors[0].zero_();
  const auto memory = [&](bool autocast, int64_t tokens) {
    const nn::Autocast half(at::kCPU, at::kHalf, autocast);
    const auto more = x.expand({1, tokens, -1});
    const auto copy = state.map([](const Tensor& t) { return t.clone(); });
    return path(more, Tensor(), copy, true).second.parts[1].tensors[0];
  };
  for (const int64_t tokens : {1, 3})
    CHECK(at::allclose(memory(true, tokens), memory(false, tokens), 2e-2, 2e-3));
}
