// girih-train CORPUS: trains a byte-level language model as `make train` does, without Python.
//
// A run has one folder and can be interrupted at any time (Ctrl-C); the same command continues it. The
// folder has:
//   arguments.json   the arguments; a command with other arguments is refused
//   checkpoints/     removed when the run is finished
//   model/           the model, for from_pretrained in C++ and Python
//   sample.txt
//   result.json      written last: exists only if the run is finished
#include <ATen/CPUGeneratorImpl.h>
#include <fcntl.h>
#include <girih/girih.h>
#include <torch/serialize.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numbers>
#include <set>
#include <sstream>

#include "../nn/safetensors.h"
#include "corpus.h"
#include "program.h"
#include "recipe.h"

namespace girih::programs {
namespace {

namespace fs = std::filesystem;
using at::Tensor;
using nlohmann::json;

// Sorts options: "phi=identity  chunk=1" -> "chunk=1 phi=identity", so that equal options have equal labels.
std::string in_order(const std::string& options) {
  std::istringstream in(options);
  std::multiset<std::string> words;
  for (std::string word; in >> word;) words.insert(word);
  return c10::str(c10::Join(" ", words));
}

struct Options {
  std::string corpus, mixer = "gsa", size = "small", options, folder, device;
  std::optional<int64_t> steps, context;
  std::vector<int64_t> chunks;
  int64_t seed = 0, at_once = int64_t{1} << 15;  // tokens; the default of girih.train
};

void describe(CLI::App& app, Options& of) {
  app.add_option("corpus", of.corpus, "a file or folder of text")->required();
  app.add_option("--mixer", of.mixer, "a mixer, or several with commas that take turns")
      ->capture_default_str();
  app.add_option("--chunks", of.chunks,
                 "of cat: chunk lengths with commas, one drawn for what is read at once (adaptive)")
      ->delimiter(',');
  app.add_option("--size", of.size, "tiny, small, 10m, 50m, 100m or 340m")->capture_default_str();
  app.add_option("--steps", of.steps, "instead of the size's own");
  app.add_option("--options", of.options, "other fields of the configuration, as 'chunk=1 phi=identity'");
  app.add_option("--context", of.context, "tokens of a sequence; a step has as many as the size's own");
  app.add_option("--folder", of.folder,
                 "where the run lives (default: runs/MIXER[-adaptive][-OPTIONS]-SIZE[-CONTEXT])");
  app.add_option("--seed", of.seed, "of the first weights and of the data")
      ->capture_default_str()
      ->check(CLI::Range(int64_t{0}, INT64_MAX));
  app.add_option("--at-once", of.at_once, "tokens that a device reads at once; a batch of more goes in parts")
      ->capture_default_str();
  app.add_option("--device", of.device, "cpu or cuda (default: cuda where there is one)");
}

volatile std::sig_atomic_t stopped = 0;
void stop(int signal) {
  if (stopped != 0) std::_Exit(128 + signal);
  stopped = signal;
}

// Locks the folder of a run against other processes. girih.training locks the same file.
class Lock {
 public:
  explicit Lock(const fs::path& folder)
      : file_(folder / ".lock"), at_(open(file_.c_str(), O_RDWR | O_CREAT, 0666)) {
    struct flock whole {};
    whole.l_type = F_WRLCK, whole.l_whence = SEEK_SET;
    const bool alone = at_ >= 0 && fcntl(at_, F_SETLK, &whole) == 0;
    if (!alone && at_ >= 0) close(at_);
    TORCH_CHECK_VALUE(alone, "folder ", folder.string(),
                      ": another run is at work in it, or it cannot be written");
  }
  ~Lock() {
    std::error_code ignored;
    fs::remove(file_, ignored);
    close(at_);
  }
  Lock(const Lock&) = delete;

 private:
  fs::path file_;
  int at_;
};

// JSON as text; bytes that are not UTF-8 are replaced.
std::string text_of(const json& content, int indent = -1) {
  return content.dump(indent, ' ', /*ensure_ascii=*/false, json::error_handler_t::replace);
}

void publish(const fs::path& file, const std::string& text) {
  nn::write_whole(file, [&](std::ostream& out) { out << text; });
}

json read_json(const fs::path& file) {
  std::ifstream in(file);
  const auto content = json::parse(in, nullptr, /*allow_exceptions=*/false);
  TORCH_CHECK_VALUE(content.is_object(), "file ", file.string(), ": it is damaged; remove it or its folder");
  return content;
}

class Run {
 public:
  explicit Run(const Options& of)
      : device_(device_of(of.device)),
        size_(of.context ? with_context(recipe_of(of.size), *of.context) : recipe_of(of.size)),
        seed_(static_cast<uint64_t>(of.seed)),
        part_(part_of(size_, of.at_once)) {
    if (of.steps) size_.steps = *of.steps;
    TORCH_CHECK_VALUE(size_.steps >= 1, "--steps is ", size_.steps, "; expected at least 1");
    torch::manual_seed(seed_);
    const auto options = in_order(of.options);
    const auto config = config_of_size(of.mixer, size_, of.chunks, options);
    corpus_ = read_corpus(of.corpus, size_.context);
    auto name = of.mixer + (of.chunks.empty() ? "" : "-adaptive") + (options.empty() ? "" : "-") + options +
                "-" + of.size + (of.context ? "-" + std::to_string(*of.context) : "");
    // The name that girih.train gives the folder.
    std::ranges::replace_if(
        name, [](char c) { return c == ' ' || c == ','; }, '-');
    std::ranges::replace(name, '/', '_');
    folder_ = of.folder.empty() ? fs::path("runs") / name : fs::path(of.folder);
    arguments_ = {{"mixer", of.mixer},       {"size", of.size},     {"steps", size_.steps},
                  {"seed", of.seed},         {"corpus", of.corpus}, {"corpus_digest", corpus_.digest},
                  {"trainer", "girih-train"}};
    if (!of.chunks.empty()) arguments_["chunks"] = of.chunks;
    if (!options.empty()) arguments_["options"] = options;
    if (of.context) arguments_["context"] = size_.context;
    arguments_ = json::parse(text_of(arguments_));
    torch::manual_seed(seed_);
    model_ = nn::LanguageModel(config);
  }

  int train() {
    if (is_finished()) return 0;
    begin();
    const Lock lock(folder_);
    model_->to(device_);
    model_->train();
    optimize();
    const auto first = resume();
    const auto parts = size_.batch / part_;
    std::printf("%s, %lld parameters, on %s\n%lld steps of %lld x %lld bytes%s of %s%s\n",
                arguments_["mixer"].get<std::string>().c_str(), number(count_parameters(model_)),
                device_.str().c_str(), number(size_.steps), number(size_.batch), number(size_.context),
                parts > 1 ? (", in " + std::to_string(parts) + " parts each,").c_str() : "",
                arguments_["corpus"].get<std::string>().c_str(),
                first > 0 ? (", from step " + std::to_string(first) + " on").c_str() : "");
    const auto starts = drawn(corpus_.train, size_.steps * size_.batch, size_.context, seed_);
    const auto every = (size_.steps + 39) / 40, saves = std::max<int64_t>(1, size_.steps / 10);
    auto loss = at::zeros({}, device_);
    auto since = Clock::now();
    for (int64_t step = first, logged = first; step < size_.steps;) {
      loss +=
          train_step(windows_of(corpus_.train, starts.slice(0, step * size_.batch, (step + 1) * size_.batch),
                                size_.context),
                     step);
      ++step;
      if (step % every == 0 || step == size_.steps) {
        report(step, loss.item<double>() / static_cast<double>(step - logged), step - logged, since);
        loss.zero_(), logged = step, since = Clock::now();
      }
      if (step % saves == 0 || stopped != 0) save(step);
      if (stopped != 0 && step < size_.steps) {
        std::fputs("girih-train: stopped; the same command continues\n", stderr);
        return 128 + stopped;
      }
    }
    finish();
    return 0;
  }

 private:
  using Clock = std::chrono::steady_clock;
  static long long number(int64_t x) { return x; }
  static double rounded(double x) { return std::round(x * 1e4) / 1e4; }
  fs::path checkpoints() const { return folder_ / "checkpoints"; }

  // Compares arguments. The corpus is identified by its digest, not by its name.
  bool is_same(json other) const {
    auto own = arguments_;
    own.erase("corpus"), other.erase("corpus");
    return own == other;
  }

  bool is_finished() const {
    const auto result = folder_ / "result.json";
    if (!fs::exists(result) || !is_same(read_json(folder_ / "arguments.json"))) return false;
    std::printf("this run is finished; remove %s to train it again\n%s\n", folder_.c_str(),
                text_of(read_json(result)).c_str());
    return true;
  }

  void begin() const {
    const auto file = folder_ / "arguments.json";
    if (fs::exists(file)) {
      TORCH_CHECK_VALUE(is_same(read_json(file)), "folder ", folder_.string(),
                        ": a run of other arguments is in it; give another --folder");
      return;
    }
    const bool there = fs::exists(folder_);
    const auto others =
        there ? std::distance(fs::directory_iterator(folder_), {}) - fs::exists(folder_ / ".lock") : 0;
    TORCH_CHECK_VALUE(others == 0, "folder ", folder_.string(), ": there is something else in it");
    fs::create_directories(folder_);
    publish(file, text_of(arguments_, 2) + "\n");
  }

  void optimize() {
    const auto groups = nn::weight_decay_groups(*model_);
    const auto options = [&](double decay) {
      auto own = torch::optim::AdamWOptions(size_.learning_rate).betas({0.9, 0.95}).weight_decay(decay);
      return std::make_unique<torch::optim::AdamWOptions>(own);
    };
    std::vector<torch::optim::OptimizerParamGroup> own;
    own.emplace_back(groups.decayed, options(0.1));
    own.emplace_back(groups.undecayed, options(0.0));
    optimizer_ = std::make_unique<nn::AdamW>(std::move(own));
  }

  // Sequences of a forward pass: the largest divisor of the batch with at most `at_once` tokens, at least 1.
  static int64_t part_of(const Recipe& size, int64_t at_once) {
    TORCH_CHECK_VALUE(at_once >= 1, "--at-once is ", at_once, "; expected at least 1");
    auto part = size.batch;
    while (part > 1 && (size.batch % part != 0 || part * size.context > at_once)) --part;
    return part;
  }

  // Sets the chunk of an adaptive model for the part with this index. Depends on the seed and the index only,
  // so that a resumed run draws the same chunks.
  void draw_chunk(int64_t part) {
    const auto& chunks = model_->config.chunks;
    if (!chunks) return;
    auto generator = at::make_generator<at::CPUGeneratorImpl>(seed_ + static_cast<uint64_t>(part));
    const auto drawn = at::randint(static_cast<int64_t>(chunks->size()), {}, generator).item<int64_t>();
    model_->set_chunk((*chunks)[static_cast<size_t>(drawn)]);
  }

  Tensor train_step(const Tensor& windows, int64_t step) {
    try {
      return step_of(windows, step);
    } catch (const c10::OutOfMemoryError&) {
      const auto tokens = number(part_ * size_.context);
      TORCH_CHECK(false, "the GPU's memory is full with ", tokens,
                  " tokens at once; the same command with --at-once ", tokens / 2, " continues");
    }
  }

  Tensor step_of(const Tensor& windows, int64_t step) {
    auto mean = at::zeros({}, device_);
    auto part = step * (size_.batch / part_);
    for (const auto& some : windows.split(part_)) {
      draw_chunk(part++);
      Tensor loss;
      {
        const nn::Autocast autocast(device_, at::kBFloat16, device_.is_cuda());
        loss =
            model_->loss(some.to(device_)) * (static_cast<double>(part_) / static_cast<double>(size_.batch));
      }
      loss.backward();
      mean += loss.detach();
    }
    clip_gradients();
    for (auto& group : optimizer_->param_groups())
      group.options().set_lr(size_.learning_rate * rate_at(step, size_.steps));
    optimizer_->step();
    optimizer_->zero_grad();
    return mean;
  }

  // Scales the gradients so that their total norm is at most 1. LibTorch's clip_grad_norm_ would wait for the
  // device.
  void clip_gradients() const {
    std::vector<Tensor> gradients;
    for (const auto& weight : model_->parameters())
      if (weight.grad().defined()) gradients.push_back(weight.grad());
    const auto length = at::stack(at::_foreach_norm(gradients)).norm();
    at::_foreach_mul_(gradients, (1.0 / (length + 1e-6)).clamp_max(1.0));
  }

  void report(int64_t step, double nats, int64_t steps, Clock::time_point since) const {
    TORCH_CHECK(std::isfinite(nats), "step ", step, ": the loss is ", nats);
    const auto seconds = std::chrono::duration<double>(Clock::now() - since).count();
    std::printf("step %lld/%lld  %.3f bits per byte  %.0f tokens/s\n", number(step), number(size_.steps),
                nats / std::numbers::ln2, static_cast<double>(steps * size_.batch * size_.context) / seconds);
    std::fflush(stdout);
  }

  // Writes a checkpoint to a temporary folder and renames it; keeps the two newest checkpoints.
  void save(int64_t step) const {
    const auto named = [&](int64_t of) { return checkpoints() / ("step-" + std::to_string(of)); };
    const fs::path part = named(step).string() + ".part";
    fs::remove_all(part);
    model_->save_pretrained(part);
    torch::save(*optimizer_, (part / "optimizer.pt").string());
    fs::remove_all(named(step));
    fs::rename(part, named(step));
    auto steps = saved();
    for (; steps.size() > 2; steps.erase(steps.begin())) fs::remove_all(named(steps.front()));
  }

  std::vector<int64_t> saved() const {
    std::vector<int64_t> steps;
    if (!fs::exists(checkpoints())) return steps;
    for (const auto& at : fs::directory_iterator(checkpoints())) {
      const auto name = at.path().filename().string();
      const auto number = name.starts_with("step-") ? name.substr(5) : "";
      if (!number.empty() && number.size() < 19 && std::ranges::all_of(number, isdigit))
        steps.push_back(std::stoll(number));
    }
    std::ranges::sort(steps);
    return steps;
  }

  // Loads the newest checkpoint; returns its step, or 0.
  int64_t resume() {
    const auto steps = saved();
    if (steps.empty()) return 0;
    const auto folder = checkpoints() / ("step-" + std::to_string(steps.back()));
    const auto then = nn::from_pretrained(folder, device_);
    const at::NoGradGuard no_grad;
    const auto of = then->named_parameters();
    for (auto& item : model_->named_parameters()) item.value().copy_(of[item.key()]);
    torch::load(*optimizer_, (folder / "optimizer.pt").string(), device_);
    return steps.back();
  }

  double held_out_bits() {
    const at::NoGradGuard no_grad;
    const auto starts = spread(corpus_.held_out, size_.held_out, size_.context);
    double sum = 0.0;
    for (const auto& some : starts.split(part_)) {
      const nn::Autocast autocast(device_, at::kBFloat16, device_.is_cuda());
      const auto ids = windows_of(corpus_.held_out, some, size_.context).to(device_);
      sum += model_->loss(ids).item<double>() * static_cast<double>(some.size(0));
    }
    return sum / static_cast<double>(starts.size(0)) / std::numbers::ln2;
  }

  void finish() {
    model_->eval();
    const auto& config = model_->config;
    double bits = 0.0;
    json by_chunk;
    for (const auto chunk : config.chunks.value_or(std::vector<int64_t>{config.chunk})) {
      if (config.chunks) model_->set_chunk(chunk);
      const auto found = held_out_bits();
      by_chunk[std::to_string(chunk)] = rounded(found);
      if (chunk == config.chunk) bits = found;
    }
    if (config.chunks) model_->set_chunk(config.chunk);
    const fs::path part = folder_ / "model.part";
    fs::remove_all(part);
    model_->save_pretrained(part);
    fs::remove_all(folder_ / "model");
    fs::rename(part, folder_ / "model");
    torch::manual_seed(seed_);
    const auto prompt = corpus_.held_out.slice(0, 0, 64).to(at::kLong).unsqueeze(0);
    const auto ids = model_->generate(prompt.to(device_), {.max_new_tokens = 256, .temperature = 0.7}).cpu();
    std::string sample;
    for (int64_t i = 0; i < ids.size(1); ++i) sample += static_cast<char>(ids[0][i].item<int64_t>());
    publish(folder_ / "sample.txt", sample);
    json result = {{"mixer", arguments_["mixer"]},
                   {"size", arguments_["size"]},
                   {"parameters", count_parameters(model_)},
                   {"context", size_.context},
                   {"steps", size_.steps},
                   {"tokens", size_.steps * size_.batch * size_.context},
                   {"bits_per_byte", rounded(bits)},
                   {"corpus", arguments_["corpus"]},
                   {"folder", (folder_ / "model").string()}};
    if (arguments_.contains("options")) result["options"] = arguments_["options"];
    if (config.chunks) result["bits_per_byte_by_chunk"] = by_chunk;
    publish(folder_ / "result.json", text_of(result, 2) + "\n");
    fs::remove_all(checkpoints());
    std::printf("\nA sample, after 64 bytes of held-out text:\n\n");
    std::fwrite(sample.data(), 1, sample.size(), stdout);  // the sample may contain zero bytes
    std::printf("\n\n%s\n", text_of(result).c_str());
  }

  at::Device device_;
  Recipe size_;
  uint64_t seed_;
  int64_t part_;
  Corpus corpus_;
  fs::path folder_;
  json arguments_;
  nn::LanguageModel model_{nullptr};
  std::unique_ptr<nn::AdamW> optimizer_;
};

}  // namespace
}  // namespace girih::programs

int main(int argc, char** argv) {
  CLI::App app("Train a byte-level language model.", "girih-train");
  girih::programs::Options options;
  girih::programs::describe(app, options);
  std::signal(SIGINT, girih::programs::stop);
  std::signal(SIGTERM, girih::programs::stop);
  return girih::programs::answer(app, argc, argv, [&] { return girih::programs::Run(options).train(); });
}
