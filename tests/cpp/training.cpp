// Training by the kernels that layers have beside their mixers, against fp64.
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
std::vector<std::pair<std::string, Tensor>> trained(nn::LanguageModel& model, const Tensor& ids) {
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

// Weights that an optimizer of its own class moves, of two groups, one without a gradient.
template <class Optimizer>
struct Moved {
  std::vector<Tensor> weights;
  std::unique_ptr<Optimizer> optimizer;

  Moved(at::Device device, bool amsgrad) {
    at::manual_seed(5);
    for (const auto& size : {std::vector<int64_t>{3, 5}, {7}, {2, 2}})
      weights.push_back(at::randn(size).to(device).requires_grad_());
    const auto group = [&](std::vector<Tensor> of, double decay) {
      auto options = torch::optim::AdamWOptions(0.1).betas({0.9, 0.95}).weight_decay(decay).amsgrad(amsgrad);
      return torch::optim::OptimizerParamGroup(std::move(of),
                                               std::make_unique<torch::optim::AdamWOptions>(options));
    };
    optimizer = std::make_unique<Optimizer>(
        std::vector{group({weights[0]}, 0.3), group({weights[1], weights[2]}, 0)});
  }

  double step() {
    const auto loss = [&] {
      optimizer->zero_grad();
      auto sum = (weights[0].sin().sum() + weights[1].square().sum());
      sum.backward();
      return sum;
    };
    return optimizer->step(loss).template item<double>();
  }
};

}  // namespace

TEST_CASE("AdamW steps as LibTorch's does and goes on where the other stopped", "[training]") {
  std::vector<at::Device> devices{at::kCPU};
  if (torch::cuda::is_available()) devices.emplace_back(at::kCUDA);
  for (const auto& device : devices) {
    for (const bool amsgrad : {false, true}) {
      Moved<nn::AdamW> ours(device, amsgrad);
      Moved<torch::optim::AdamW> plain(device, amsgrad);
      const auto unused = ours.weights[2].clone();
      const auto both = [&] {
        for (int i = 0; i < 3; ++i) CHECK(std::abs(ours.step() - plain.step()) < 1e-4);
        for (size_t i = 0; i < 3; ++i) CHECK(at::allclose(ours.weights[i], plain.weights[i], 1e-5, 1e-6));
      };
      both();
      const auto first = ours.weights[0].clone();
      std::stringstream of_ours, of_plain;
      torch::save(*ours.optimizer, of_ours), torch::save(*plain.optimizer, of_plain);
      torch::load(*ours.optimizer, of_plain), torch::load(*plain.optimizer, of_ours);
      both();
      CHECK(!at::allclose(ours.weights[0], first, 0, 1e-2));
      CHECK(ours.weights[2].equal(unused));
    }
  }
}

TEST_CASE("Autocast holds while it lives", "[training]") {
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
    config.vocab_size = 16, config.hidden_size = 64, config.num_slots = 16;
    INFO(name_of(config));
    at::manual_seed(3);
    nn::LanguageModel model(config);
    const auto text = ids(3, 70);
    model->to(at::kDouble);
    const auto exact = trained(model, text);
    model->to(at::kFloat);
    const auto here = trained(model, text);
    model->to(at::kCUDA);
    const auto there = trained(model, text.to(at::kCUDA));
    for (size_t i = 0; i < exact.size(); ++i) {
      INFO(exact[i].first << ": " << error(there[i].second, exact[i].second) << ", on a CPU "
                          << error(here[i].second, exact[i].second));
      // The mixers' kernels round to 16 bits what a CPU has in fp32, and their errors are held to account by
      // tests of their own: what is seen here is that the parts go together.
      CHECK(error(there[i].second, exact[i].second) <= 2 * error(here[i].second, exact[i].second) + 0.1);
    }
  }
}
