// Training with the kernels of layers outside their mixers, compared with fp64.
#include <torch/cuda.h>
#include <torch/serialize.h>

#include <sstream>

#include "catch.h"
#include "models.h"

using at::Tensor;
using namespace girih;
using namespace girih::test;

namespace {

double error(const Tensor& found, const Tensor& wanted) {
  return ((found.to(at::kDouble).cpu() - wanted).norm() / wanted.norm()).item<double>();
}

// The loss, and the gradients of all parameters by name.
std::vector<std::pair<std::string, Tensor>> loss_and_gradients(nn::LanguageModel& model, const Tensor& ids) {
  model->zero_grad();
  const bool in_bf16 = model->parameters()[0].scalar_type() == at::kFloat;
  Tensor loss;
  {
    const nn::Autocast autocast(ids.device(), at::kBFloat16, in_bf16);
    loss = model->loss(ids);
  }
  loss.backward();
  std::vector<std::pair<std::string, Tensor>> all{{"loss", loss.detach()}};
  for (const auto& item : model->named_parameters())
    all.emplace_back(item.key(), item.value().grad().clone());
  return all;
}

// Weights and an optimizer of the given class with two parameter groups: one group has weights of two dtypes;
// the other has a weight with a gradient in every second step and a weight without gradients.
template <class Optimizer>
struct OptimizerRun {
  bool amsgrad;
  double eps;
  std::vector<Tensor> weights;
  std::unique_ptr<Optimizer> optimizer;
  int steps = 0;

  OptimizerRun(at::Device device, bool amsgrad_, double eps_ = 1e-8) : amsgrad(amsgrad_), eps(eps_) {
    at::manual_seed(5);
    for (const auto& size : {std::vector<int64_t>{3, 5}, {4}, {7}, {2, 2}})
      weights.push_back(at::randn(size).to(device));
    weights[1] = weights[1].to(at::kDouble);
    for (auto& weight : weights) weight.requires_grad_();
    make_optimizer();
  }

  void make_optimizer() {
    const auto group = [&](std::vector<Tensor> parameters, double decay) {
      auto options =
          torch::optim::AdamWOptions(0.1).betas({0.8, 0.9}).eps(eps).weight_decay(decay).amsgrad(amsgrad);
      return torch::optim::OptimizerParamGroup(std::move(parameters),
                                               std::make_unique<torch::optim::AdamWOptions>(options));
    };
    optimizer = std::make_unique<Optimizer>(
        std::vector{group({weights[0], weights[1]}, 0.3), group({weights[2], weights[3]}, 0)});
  }

  double step() {
    const auto loss = [&] {
      optimizer->zero_grad();
      auto sum = weights[0].sin().sum() + weights[1].cos().sum();
      if (steps++ % 2 == 0) sum = sum + weights[2].square().sum();
      sum.backward();
      return sum;
    };
    return optimizer->step(loss).template item<double>();
  }
};

// The weight after one step of each class, with this gradient.
std::pair<Tensor, Tensor> step_both(const Tensor& weight, const Tensor& gradient) {
  const auto step_with = [&](auto type) {
    using Optimizer = typename decltype(type)::element_type;
    const auto base = weight.storage().nbytes() / weight.element_size();
    const auto storage = at::zeros({static_cast<int64_t>(base)}).as_strided(weight.sizes(), weight.strides());
    const auto x = storage.copy_(weight).requires_grad_();
    x.mutable_grad() = gradient;
    Optimizer({x}, torch::optim::AdamWOptions(0.1)).step();
    return x.detach().as_strided({static_cast<int64_t>(base)}, {1}, 0);
  };
  return {step_with(std::unique_ptr<nn::AdamW>()), step_with(std::unique_ptr<torch::optim::AdamW>())};
}

}  // namespace

TEST_CASE("AdamW equals LibTorch's AdamW and continues from its state", "[training]") {
  std::vector<at::Device> devices{at::kCPU};
  if (torch::cuda::is_available()) devices.emplace_back(at::kCUDA);
  for (const auto& device : devices) {
    for (const bool amsgrad : {false, true}) {
      const double eps = amsgrad ? 1e-8 : 0.5;
      OptimizerRun<nn::AdamW> girih_run(device, amsgrad, eps);
      OptimizerRun<torch::optim::AdamW> torch_run(device, amsgrad, eps);
      const auto unused = girih_run.weights[3].clone(), first = girih_run.weights[0].clone();
      const auto check_steps = [&] {
        for (int i = 0; i < 3; ++i) CHECK(std::abs(girih_run.step() - torch_run.step()) < 1e-4);
        for (size_t i = 0; i < 4; ++i)
          CHECK(at::allclose(girih_run.weights[i], torch_run.weights[i], 1e-5, 1e-6));
      };
      check_steps();
      std::stringstream girih_file, torch_file;
      torch::save(*girih_run.optimizer, girih_file), torch::save(*torch_run.optimizer, torch_file);
      girih_run.make_optimizer(), torch_run.make_optimizer();
      torch::load(*girih_run.optimizer, torch_file), torch::load(*torch_run.optimizer, girih_file);
      check_steps();
      CHECK(!at::allclose(girih_run.weights[0], first, 0, 1e-2));
      CHECK(girih_run.weights[3].equal(unused));
    }
  }
}

TEST_CASE("AdamW supports strided weights, and gradients with other strides", "[training]") {
  at::manual_seed(6);
  const auto all = at::randn({4, 8}), gradient = at::randn({5, 4});
  for (const auto& [weight, grad] : std::vector<std::pair<Tensor, Tensor>>{
           {all.slice(1, 0, 2), at::ones({4, 2})},
           {at::randn({4, 5}), gradient.t()},
           {gradient.t(), at::randn({4, 5})},
           {at::randn({4, 5}), at::randn({4, 1}).expand({4, 5})},
       }) {
    const auto [result, expected] = step_both(weight, grad);
    CHECK(at::allclose(result, expected, 1e-5, 1e-6));
  }
}

TEST_CASE("AdamW refuses a state of another size and increments the weight's version", "[training]") {
  const auto make_weight = [](int64_t size) {
    auto weight = at::ones({size}).requires_grad_();
    weight.mutable_grad() = at::ones({size});
    return weight;
  };
  auto small_weight = make_weight(4), large_weight = make_weight(4096);
  nn::AdamW small({small_weight}, torch::optim::AdamWOptions(0.1)),
      large({large_weight}, torch::optim::AdamWOptions(0.1));
  const auto x = at::ones({4}).requires_grad_();
  const auto product = x * small_weight;
  small.step();
  CHECK_THROWS_WITH(product.sum().backward(), ContainsSubstring("inplace operation"));
  std::stringstream file;
  torch::save(small, file), torch::load(large, file);
  CHECK_THROWS(large.step());
}

TEST_CASE("Autocast is active during its lifetime", "[training]") {
  const auto x = at::ones({2, 3});
  const auto product = [&] { return at::mm(x, x.t()).scalar_type(); };
  CHECK(product() == at::kFloat);
  {
    const nn::Autocast outer(at::kCPU);
    CHECK(product() == at::kBFloat16);
    {
      const nn::Autocast half(at::kCPU, at::kHalf);
      CHECK(product() == at::kHalf);
      const nn::Autocast none(at::kCPU, at::kBFloat16, false);
      CHECK(product() == at::kFloat);
    }
    CHECK(product() == at::kBFloat16);
  }
  CHECK(product() == at::kFloat);
}

TEST_CASE("Models in bf16 train on a GPU as on a CPU", "[training]") {
  if (!torch::cuda::is_available()) return;
  for (auto config : configurations()) {
    if (config.reads("num_slots")) config.num_slots = 16;
    config.vocab_size = 16, config.hidden_size = 64;
    INFO(name_of(config));
    at::manual_seed(3);
    nn::LanguageModel model(config);
    const auto text = ids(3, 70);
    model->to(at::kDouble);
    const auto exact = loss_and_gradients(model, text);
    model->to(at::kFloat);
    const auto cpu = loss_and_gradients(model, text);
    model->to(at::kCUDA);
    const auto gpu = loss_and_gradients(model, text.to(at::kCUDA));
    for (size_t i = 0; i < exact.size(); ++i) {
      INFO(exact[i].first << ": " << error(gpu[i].second, exact[i].second) << ", on a CPU "
                          << error(cpu[i].second, exact[i].second));
      // The mixers' kernels round to 16 bits what a CPU computes in fp32; other tests check their accuracy.
      // This test checks that the parts work together, hence the loose bound.
      CHECK(error(gpu[i].second, exact[i].second) <= 2 * error(cpu[i].second, exact[i].second) + 0.1);
    }
  }
}
