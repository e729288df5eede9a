// Training by the kernels that layers have beside their mixers, against fp64.
#include <ATen/autocast_mode.h>
#include <torch/cuda.h>

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
  const auto device = ids.device().type();
  const bool in_bf16 = model->parameters()[0].scalar_type() == at::kFloat;
  at::autocast::set_autocast_dtype(device, at::kBFloat16);
  at::autocast::set_autocast_enabled(device, in_bf16);
  const auto loss = model->loss(ids);
  at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(device, false);
  loss.backward();
  std::vector<std::pair<std::string, Tensor>> all{{"loss", loss.detach()}};
  for (const auto& item : model->named_parameters())
    all.emplace_back(item.key(), item.value().grad().clone());
  return all;
}

}  // namespace

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
