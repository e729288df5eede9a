// The parts of a decoding step other than the mixers' own steps: products, and blocks computed with products.
#include "../../csrc/nn/step.h"

#include <ATen/autocast_mode.h>
#include <torch/cuda.h>
#include <torch/nn/modules/container/sequential.h>

#include <cmath>

#include "../../csrc/nn/decoding.h"
#include "catch.h"
#include "models.h"

using at::Tensor;
using namespace girih;
using namespace girih::test;

namespace {

constexpr int64_t kWidth = 64;

// A GPU with kernels is available.
bool has_kernels() {
  return torch::cuda::is_available() &&
         nn::make_recorder(at::zeros({1, 1}, at::device(at::kCUDA).dtype(at::kLong))) != nullptr;
}

Tensor draw(at::IntArrayRef sizes) { return at::randn(sizes, at::kDouble); }

// Random norms and biases: their initial values have no effect.
void randomize_vectors(torch::nn::Module& module) {
  for (auto& parameter : module.parameters()) {
    if (parameter.dim() == 1) torch::nn::init::uniform_(parameter, 0.5, 1.5);
  }
}

Tensor normalize_rows(const Tensor& x, const Tensor& weight, double eps) {
  return x / (x.square().mean(-1, true) + eps).sqrt() * weight;
}

// A block with every mixer and each of its options, in fp64.
std::vector<std::pair<std::string, nn::Block>> blocks() {
  std::vector<std::pair<std::string, nn::Config>> all;
  for (const auto& name : nn::mixer_names()) all.emplace_back(name, nn::Config{});
  all.emplace_back("delta_product", nn::Config{.n = 3, .gated = false});
  all.emplace_back("delta_product", nn::Config{.n = 2, .allow_neg_eigval = true});
  all.emplace_back("trellis", nn::Config{.gated = false});
  all.emplace_back("lattice", nn::Config{.gated = false});
  all.emplace_back("gsa", nn::Config{.conv_size = 4});
  all.emplace_back("gated_delta_product", nn::Config{.n = 3, .num_groups = 2});
  all.emplace_back("raven", nn::Config{.topk = 3, .router_mlp = true, .output_gate = true});
  all.emplace_back("attention", nn::Config{.num_kv_heads = 1});
  all.emplace_back("gsa", nn::Config{.num_kv_heads = 1});
  std::vector<std::pair<std::string, nn::Block>> result;
  at::manual_seed(1);
  for (auto& [name, config] : all) {
    config.hidden_size = kWidth, config.num_hidden_layers = 1, config.num_heads = 2, config.hybrid = {name};
    config = with_sizes(config, 16);
    nn::Block block(nn::make_mixer(name, config.completed()), kWidth, 96);
    block->to(at::kDouble);
    randomize_vectors(*block);
    result.emplace_back(name, block);
  }
  return result;
}

// x [B, T, hidden_size] through the modules of the block one by one.
nn::Output forward_by_modules(nn::Block& block, const Tensor& x, const nn::State& state) {
  auto& mlp = *block->mlp;
  auto [y, after] = block->mixer->forward(block->mixer_norm(x), {}, state, /*use_cache=*/true);
  const auto h = x + y, u = block->mlp_norm(h);
  return {h + mlp.down_proj(at::silu(mlp.gate_proj(u)) * mlp.up_proj(u)), after};
}

nn::State clone_state(const nn::State& state) {
  return state.map([](const Tensor& t) { return t.clone(); });
}

// Rounds to bf16, except for parameters that stay in fp32, and converts to fp64 with the same values.
template <class Module>
void round_weights(Module& module) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kDouble}) module.to(at::kCPU, dtype);
}
template <class Module>
void to_gpu(Module& module) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) module.to(at::kCUDA, dtype);
}

double error(const Tensor& found, const Tensor& wanted) {
  return ((found.to(at::kDouble).cpu() - wanted).norm() / wanted.norm()).item<double>();
}

}  // namespace

TEST_CASE("Products equal their formulas", "[step]") {
  const at::NoGradGuard no_grad;
  at::manual_seed(0);
  const auto x = draw({3, 1, 16}), w = draw({5, 16}), up = draw({3, 1, 16}), b = draw({5}),
             a = at::rand({5}, at::kDouble), weight = at::rand({16}, at::kDouble);
  const auto r = at::matmul(x, w.t());
  const std::vector<nn::Product> wanted = {
      {w},
      {w, "none", b},
      {w, "linear", b},
      {w, "sigmoid", b, {}, 2.0},
      {w, "sigmoid"},
      {w, "logsigmoid", {}, {}, 0.125},
      {w, "decay", b, a},
  };
  const std::vector<Tensor> expected = {
      r,
      r + b,
      r + b,
      2 / (1 + (-r - b).exp()),
      1 / (1 + (-r).exp()),
      -(1 + (-r).exp()).log() / 8,
      -a.exp() * (1 + (r + b).exp()).log(),
  };
  const auto silu = x / (1 + (-x).exp());
  const std::vector<std::pair<nn::RowInput, Tensor>> inputs = {
      {{}, x},
      {{"rms_norm", weight, 0.1}, normalize_rows(x, weight, 0.1)},
      {{"silu_rms_norm", weight, 0.1}, normalize_rows(silu, weight, 0.1)},
      {{"silu_product", up}, silu * up},
  };
  for (const auto dtype : {at::kDouble, at::kFloat}) {
    const double most = dtype == at::kDouble ? 1e-12 : 1e-5;
    const auto cast = [&](const Tensor& t) { return t.defined() ? t.to(dtype) : t; };
    std::vector<nn::Product> products;
    for (const auto& [m, gate, bias, rate, scale] : wanted)
      products.push_back({cast(m), gate, cast(bias), cast(rate), scale});
    const auto found = nn::products(cast(x), products);
    REQUIRE(found.size() == expected.size());
    for (size_t i = 0; i < found.size(); ++i) {
      INFO("product " << i);
      CHECK(at::allclose(found[i], cast(expected[i]), most, most));
    }
    for (const auto& [input, u] : inputs) {
      INFO(input.kind);
      const auto y = nn::products(cast(x), {{cast(w)}}, {input.kind, cast(input.other), input.eps}, cast(r));
      REQUIRE(y.size() == 1);
      CHECK(at::allclose(y[0], cast(at::matmul(u, w.t()) + r), most, most));
    }
  }
  // Gates are in fp32 when the products have 16 bits.
  const auto to_bf16 = [](const Tensor& t) { return t.to(at::kBFloat16); };
  const auto y = nn::products(to_bf16(x), {{to_bf16(w)}, {to_bf16(w), "sigmoid", b.to(at::kFloat)}});
  CHECK(y[0].scalar_type() == at::kBFloat16);
  CHECK(y[1].scalar_type() == at::kFloat);
  CHECK_THROWS_AS(nn::products(x, {{w, "tanh"}}), c10::ValueError);
  CHECK_THROWS_AS(nn::products(x, {{w}}, {"relu", weight}), c10::ValueError);
}

TEST_CASE("A block computed with products equals its modules one by one in every mixer", "[step]") {
  const at::NoGradGuard no_grad;
  for (auto& [name, block] : blocks()) {
    for (const auto dtype : {at::kDouble, at::kFloat}) {
      INFO(name << " in " << dtype);
      block->to(dtype);
      const double most = dtype == at::kDouble ? 1e-12 : 1e-5;
      const auto x = draw({3, 9, kWidth}).to(dtype);
      auto [y, state] = block->forward(x.slice(1, 0, 4), {}, {}, /*use_cache=*/true);
      auto [z, other] = forward_by_modules(block, x.slice(1, 0, 4), {});
      CHECK(at::allclose(y, z, most, most));
      for (int64_t t = 4; t < 9; ++t) {
        const auto token = x.slice(1, t, t + 1);
        std::tie(y, state) = block->forward(token, {}, state, /*use_cache=*/true);
        std::tie(z, other) = forward_by_modules(block, token, other);
        INFO("token " << t);
        CHECK(at::allclose(y, z, most, most));
      }
    }
  }
}

TEST_CASE("A mask and packed sequences reach a block's mixer", "[step]") {
  const at::NoGradGuard no_grad;
  for (auto& [name, block] : blocks()) {
    INFO(name);
    const auto x = draw({1, 8, kWidth});
    const auto mask = at::arange(8).ge(3).unsqueeze(0);
    const auto packed = block->forward(x, {}, {}, false, at::tensor({0, 3, 8})).first;
    const auto alone = block->forward(x.slice(1, 3)).first;
    CHECK(at::allclose(packed.slice(1, 3), alone, 1e-9, 1e-9));
    CHECK(at::allclose(block->forward(x, mask).first.slice(1, 3), alone, 1e-9, 1e-9));
  }
}

TEST_CASE("A linear layer adds its bias", "[step]") {
  const at::NoGradGuard no_grad;
  nn::SwiGLU mlp(8, 16);
  for (auto* proj : {&mlp->gate_proj, &mlp->up_proj, &mlp->down_proj}) {
    const auto& options = (*proj)->options;
    *proj = torch::nn::Linear(options.in_features(), options.out_features());
  }
  const auto x = at::randn({2, 1, 8});
  const auto y = mlp->down_proj(at::silu(mlp->gate_proj(x)) * mlp->up_proj(x));
  CHECK(at::allclose(mlp(x), y));
}

TEST_CASE("The feed-forward layer works in torch::nn::Sequential", "[step]") {
  torch::nn::Sequential layers(nn::SwiGLU(8, 16), torch::nn::Linear(8, 4));
  CHECK(layers->forward(at::randn({2, 8})).sizes() == at::IntArrayRef{2, 4});
}

TEST_CASE("A copy of a loaded embedding has values of its own", "[step]") {
  const at::NoGradGuard no_grad;
  const auto embedding = [] {
    const nn::SkipInitGuard none;
    return nn::embedding(5, 3);
  }();
  embedding->weight.fill_(1.0);
  const auto copy = std::dynamic_pointer_cast<torch::nn::EmbeddingImpl>(embedding->clone());
  copy->weight.fill_(2.0);
  CHECK(at::allclose(embedding->weight, at::ones({5, 3})));
}

TEST_CASE("The kernel is selected for few rows of 16 bits on a GPU without gradients", "[step]") {
  at::NoGradGuard no_grad;
  const auto has_kernel = [](at::Device device, at::IntArrayRef sizes, at::ScalarType dtype) {
    const auto x = at::zeros(sizes, at::device(device).dtype(dtype));
    return nn::has_skinny_gemm(x, {{x.new_zeros({8, x.size(-1)})}});
  };
  CHECK(!has_kernel(at::kCPU, {2, 1, 64}, at::kBFloat16));
  if (!has_kernels()) return;
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    CHECK(has_kernel(at::kCUDA, {2, 1, 64}, dtype));
    CHECK(has_kernel(at::kCUDA, {16, 64}, dtype));
    CHECK(has_kernel(at::kCUDA, {12, 8192}, dtype));
    CHECK(!has_kernel(at::kCUDA, {17, 64}, dtype));
    CHECK(!has_kernel(at::kCUDA, {0, 64}, dtype));
    CHECK(!has_kernel(at::kCUDA, {2, 60}, dtype));
    CHECK(!has_kernel(at::kCUDA, {2, 8200}, dtype));
    CHECK(!has_kernel(at::kCUDA, {13, 8192}, dtype));
  }
  CHECK(!has_kernel(at::kCUDA, {2, 1, 64}, at::kFloat));
  const auto x = at::zeros({2, 64}, at::device(at::kCUDA).dtype(at::kBFloat16)), w = x.new_zeros({8, 64});
  const auto f = at::zeros({8}, at::device(at::kCUDA)), wide = x.new_zeros({2 * 64 + 1});
  CHECK(nn::has_skinny_gemm(x, std::vector<nn::Product>(8, {w})));
  CHECK(!nn::has_skinny_gemm(x, std::vector<nn::Product>(9, {w})));
  CHECK(nn::has_skinny_gemm(x, {{w, "decay", f, f}}, {"rms_norm", x[0]}));
  CHECK(!nn::has_skinny_gemm(x, {{w, "decay", f.to(at::kDouble), f}}));
  CHECK(!nn::has_skinny_gemm(x, {{w, "none", f}}));
  CHECK(!nn::has_skinny_gemm(x, {{w.to(at::kFloat)}}));
  CHECK(!nn::has_skinny_gemm(x, {{w.t().contiguous().t()}}));
  CHECK(!nn::has_skinny_gemm(x, {{w}}, {"rms_norm", x[0].to(at::kFloat)}));
  CHECK(!nn::has_skinny_gemm(wide.slice(0, 1).view({2, 64}), {{w}}));
  CHECK(!nn::has_skinny_gemm(x, {{w}}, {}, x.new_zeros({8, 2}).t()));
  at::autocast::set_autocast_enabled(at::kCUDA, true);
  CHECK(!nn::has_skinny_gemm(x, {{w}}));
  at::autocast::set_autocast_enabled(at::kCUDA, false);
  const at::AutoGradMode with_gradient(true);
  CHECK(!nn::has_skinny_gemm(x, {{w}}));
}

TEST_CASE("Products by the kernel are as accurate as products by ATen", "[step]") {
  if (!has_kernels()) return;
  const at::NoGradGuard no_grad;
  at::manual_seed(2);
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    const auto rounded = [&](const Tensor& t) { return t.to(dtype).to(at::kDouble); };
    const double unit = dtype == at::kBFloat16 ? std::exp2(-7) : std::exp2(-10);
    for (const int64_t rows : {1, 3, 16}) {
      const auto x = rounded(draw({rows, 1, 264})), w = rounded(draw({40, 264}) / 16),
                 up = rounded(draw({rows, 1, 264})), weight = rounded(at::rand({264}, at::kDouble)),
                 b = draw({40}).to(at::kFloat).to(at::kDouble);
      const std::vector<nn::Product> wanted = {{w},
                                               {w, "linear", b},
                                               {w, "sigmoid", {}, {}, 2.0},
                                               {w, "logsigmoid", b, {}, 0.125},
                                               {w, "decay", b, b}};
      const std::vector<nn::RowInput> inputs = {
          {}, {"rms_norm", weight, 1e-3}, {"silu_rms_norm", weight, 1e-3}, {"silu_product", up}};
      for (const auto& input : inputs) {
        INFO(input.kind << ", " << rows << " rows in " << dtype);
        const auto on_gpu = [&](const Tensor& t) { return t.defined() ? t.to(at::kCUDA, dtype) : t; };
        std::vector<nn::Product> gpu_products, cpu_products;
        for (const auto& [m, gate, bias, rate, scale] : wanted) {
          const auto as_float = [&](const Tensor& t) { return t.defined() ? t.to(at::kFloat) : t; };
          cpu_products.push_back({m.to(dtype), gate, as_float(bias), as_float(rate), scale});
          const auto on_device = [&](const Tensor& t) { return t.defined() ? t.to(at::kCUDA) : t; };
          gpu_products.push_back({on_gpu(m), gate, on_device(cpu_products.back().bias),
                                  on_device(cpu_products.back().rate), scale});
        }
        const nn::RowInput gpu_input = {input.kind, on_gpu(input.other), input.eps};
        REQUIRE(nn::has_skinny_gemm(on_gpu(x), gpu_products, gpu_input));
        const auto exact = nn::products(x, wanted, input);
        const auto kernel = nn::products(on_gpu(x), gpu_products, gpu_input);
        const auto other = input.other.defined() ? input.other.to(dtype) : input.other;
        const auto aten =
            nn::products(x.to(dtype), cpu_products, {input.kind, other, input.eps});  // on the CPU
        for (size_t i = 0; i < exact.size(); ++i) {
          INFO(wanted[i].gate);
          CHECK(kernel[i].scalar_type() == aten[i].scalar_type());
          CHECK(kernel[i].sizes() == aten[i].sizes());
          const auto most = error(aten[i], exact[i]);
          CHECK(error(kernel[i], exact[i]) <= 1.5 * most + unit / 16);
        }
        const auto r = rounded(draw({rows, 1, 40}));
        const auto sum = nn::products(on_gpu(x), {gpu_products[0]}, gpu_input, on_gpu(r))[0];
        CHECK(error(sum, exact[0] + r) <= unit);
      }
    }
  }
}

TEST_CASE("A step by the kernel is as accurate as a step by the layers in every mixer", "[step]") {
  if (!has_kernels()) return;
  const at::NoGradGuard no_grad;
  for (auto& [name, block] : blocks()) {
    for (const int64_t batch : {1, 3, 16}) {
      INFO(name << ", batch " << batch);
      const auto x = draw({batch, 6, kWidth}).to(at::kBFloat16);
      round_weights(*block);
      const auto token = x.slice(1, 5).to(at::kDouble);
      auto state = block->forward(x.slice(1, 0, 5).to(at::kDouble), {}, {}, /*use_cache=*/true).second;
      const auto exact = block->forward(token, {}, clone_state(state), /*use_cache=*/true).first;
      to_gpu(*block);
      const auto gpu_x = x.to(at::kCUDA);
      state = block->forward(gpu_x.slice(1, 0, 5), {}, {}, /*use_cache=*/true).second;
      const auto last = gpu_x.slice(1, 5).contiguous();
      REQUIRE(nn::has_skinny_gemm(last, {nn::make_product(block->mlp->gate_proj)}, block->mlp_norm->input()));
      Tensor layers;
      {
        const at::AutoGradMode with_gradient(true);  // disables the kernel
        layers = block->forward(last, {}, clone_state(state), /*use_cache=*/true).first.detach();
      }
      const auto step = block->forward(last, {}, state, /*use_cache=*/true).first;
      const auto most = error(layers, exact);
      INFO("kernel " << error(step, exact) << ", layers " << most);
      CHECK(most < 0.05);
      CHECK(error(step, exact) <= 1.5 * most + 1e-3);
    }
  }
}

TEST_CASE("Models in bf16 on a GPU give the logits of fp64", "[step]") {
  if (!has_kernels()) return;
  const at::NoGradGuard no_grad;
  constexpr int64_t prompt = 5, steps = 3 * kChunk;
  for (auto config : configurations()) {
    if (config.reads("num_slots")) config.num_slots = 16;
    config.hidden_size = kWidth, config.initializer_range = 0.1;
    for (const int64_t batch : {1, 3}) {
      INFO(name_of(config) << ", batch " << batch);
      auto model = in_double(config);
      round_weights(*model);
      const auto text = ids(batch, prompt + steps);
      const auto exact = model(text).first;
      to_gpu(*model);
      const auto gpu_text = text.to(at::kCUDA);
      nn::Decoder decode(*model, nn::make_recorder(gpu_text));
      std::vector<Tensor> logits{decode(gpu_text.slice(1, 0, prompt)).clone()};
      for (auto t = prompt; t < prompt + steps; ++t)
        logits.push_back(decode(gpu_text.slice(1, t, t + 1)).clone());
      const auto found = at::stack(logits, 1), wanted = exact.slice(1, prompt - 1);
      Tensor layers;
      {
        const at::AutoGradMode with_gradient(true);
        layers = model(gpu_text).first.detach().slice(1, prompt - 1);
      }
      const auto most = error(layers, wanted);
      INFO("steps " << error(found, wanted) << ", layers " << most);
      CHECK(error(found, wanted) <= 2 * most + 2e-3);
    }
  }
}
