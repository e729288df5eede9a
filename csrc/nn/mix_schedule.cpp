// MixSchedule: the weight of a model's mixtures as a function of the training step. The Python twin is
// girih.MixSchedule.
#include <algorithm>
#include <cmath>

#include "fields.h"
#include "layer.h"

namespace girih::nn {
namespace {

const std::map<std::string, std::vector<std::string>>& schedules() {
  static const std::map<std::string, std::vector<std::string>> options = {
      {"constant", {"final"}}, {"gradual", {"first", "final", "steps"}}, {"cyclic", {"levels", "steps"}}};
  return options;
}

}  // namespace

MixSchedule::MixSchedule(std::string schedule, MixScheduleOptions settings)
    : schedule_(std::move(schedule)),
      first_(settings.first.value_or(0.01)),
      final_(settings.final.value_or(0.5)),
      steps_(settings.steps.value_or(100)),
      levels_(settings.levels.value_or(std::vector<double>{0.0, 0.5, 1.0})) {
  check_value("schedule", schedule_, AllowedValues{.words = {"constant", "gradual", "cyclic"}});
  const auto& read_options = schedules().at(schedule_);
  const auto refuse_unread = [&](const char* name, bool is_set) {
    TORCH_CHECK_VALUE(!is_set || std::ranges::count(read_options, name) > 0, name, ": the schedule '",
                      schedule_, "' has no such option; expected one of ", c10::Join(", ", read_options));
  };
  refuse_unread("first", settings.first.has_value());
  refuse_unread("final", settings.final.has_value());
  refuse_unread("levels", settings.levels.has_value());
  refuse_unread("steps", settings.steps.has_value());
  TORCH_CHECK_VALUE(steps_ >= 1, "steps is ", steps_, "; expected a whole number, 1 or more");
  TORCH_CHECK_VALUE(is_weight(first_), "first is ", first_, "; expected weights from 0 to 1");
  TORCH_CHECK_VALUE(is_weight(final_), "final is ", final_, "; expected weights from 0 to 1");
  TORCH_CHECK_VALUE(!levels_.empty() && std::ranges::all_of(levels_, is_weight), "levels is [",
                    c10::Join(", ", levels_), "]; expected weights from 0 to 1");
}

double MixSchedule::weight(int64_t step) const {
  TORCH_CHECK_VALUE(step >= 0, "step is ", step, "; expected a whole number, 0 or more");
  if (schedule_ == "constant") return final_;
  if (schedule_ == "gradual")
    return first_ + (final_ - first_) * std::min(double(step) / double(steps_), 1.0);
  return levels_[size_t(step / steps_) % levels_.size()];
}

void MixSchedule::set_weights(const torch::nn::Module& model, int64_t step) const {
  const auto m = weight(step);
  std::vector<MemoryAsGateImpl*> mixtures;
  for (const auto& module : model.modules()) {
    if (auto* mixture = dynamic_cast<MemoryAsGateImpl*>(module.get())) mixtures.push_back(mixture);
  }
  TORCH_CHECK_VALUE(!mixtures.empty(), "model has no mixture whose weight a schedule could move; expected ",
                    "injections or the mixer mag in its configuration");
  // Check all mixtures before the first weight changes.
  for (const auto* mixture : mixtures)
    TORCH_CHECK_VALUE(!mixture->options.learned,
                      "weight is learned by this mixture; a schedule cannot set it");
  for (auto* mixture : mixtures) mixture->set_weight(m);
}

}  // namespace girih::nn
