// girih-generate FOLDER [PROMPT ...]: continues texts with a language model, as bytes or as token ids.
#include <ATen/Context.h>
#include <girih/girih.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <iterator>
#include <sstream>

#include "program.h"

namespace girih::programs {
namespace {

struct Options {
  std::string folder, device, dtype;
  std::vector<std::string> prompts;
  bool ids = false, lines = false, quiet = false;
  std::vector<int64_t> eos;
  std::optional<int64_t> seed;
  nn::GenerateOptions generate;
};

void describe(CLI::App& app, Options& of) {
  app.add_option("folder", of.folder, "what save_pretrained wrote: config.json and model.safetensors")
      ->required();
  auto* prompts = app.add_option("prompts", of.prompts,
                                 "texts to continue; without any, all of standard input is one prompt");
  app.add_flag("--lines", of.lines, "every line of standard input is a prompt")->excludes(prompts);
  app.add_flag("--ids", of.ids, "prompts and texts are token ids, numbers with spaces, not bytes");
  auto& generate = of.generate;
  app.add_option("--max-new-tokens", generate.max_new_tokens, "of each text")
      ->capture_default_str()
      ->check(CLI::Range(0, 1'000'000'000));
  app.add_option("--temperature", generate.temperature, "0: always the most likely token")
      ->capture_default_str();
  app.add_option("--top-k", generate.top_k, "sample among these many tokens");
  app.add_option("--top-p", generate.top_p, "and among the fewest that have this much of the probability");
  app.add_option("--eos", of.eos, "tokens that end a text, instead of the model's own")->delimiter(',');
  app.add_option("--seed", of.seed, "of samples; without one they differ from run to run")
      ->check(CLI::Range(int64_t{0}, INT64_MAX));
  app.add_option("--device", of.device, "cpu or cuda (default: cuda where there is one)");
  app.add_option("--dtype", of.dtype, "float32, bfloat16 or float16 (default: the file's)");
  app.add_flag("--quiet", of.quiet, "no line on standard error about the time it took");
}

std::vector<int64_t> parse_token_ids(const std::string& prompt, int64_t vocab_size) {
  std::vector<int64_t> ids;
  std::istringstream in(prompt);
  for (std::string word; in >> word;) {
    size_t read = 0;
    int64_t id = -1;
    try {
      id = std::stoll(word, &read);
    } catch (const std::exception&) {
    }
    TORCH_CHECK_VALUE(read == word.size() && id >= 0 && id < vocab_size, "prompts: ", word,
                      " is not a token id; expected numbers from 0 to ", vocab_size - 1);
    ids.push_back(id);
  }
  return ids;
}

std::vector<std::vector<int64_t>> read_prompts(Options of, int64_t vocab_size) {
  if (of.prompts.empty() && of.lines) {
    for (std::string line; std::getline(std::cin, line);) {
      if (!line.empty() && line.back() == '\r') line.pop_back();  // line endings "\r\n"
      of.prompts.push_back(line);
    }
  } else if (of.prompts.empty()) {
    of.prompts.emplace_back(std::istreambuf_iterator<char>(std::cin), std::istreambuf_iterator<char>());
  }
  TORCH_CHECK_VALUE(!of.prompts.empty(), "prompts is empty; expected at least one");
  std::vector<std::vector<int64_t>> all;
  for (const auto& prompt : of.prompts) {
    all.push_back(of.ids ? parse_token_ids(prompt, vocab_size) : to_byte_ids(prompt));
    TORCH_CHECK_VALUE(!all.back().empty(), "prompts: number ", all.size(), " is empty");
  }
  return all;
}

// Writes a text to standard output, token by token.
class Writer {
 public:
  explicit Writer(bool ids) : ids_(ids) {}

  void put(int64_t token) {
    if (ids_) {
      std::printf("%s%lld", has_output_ ? " " : "", static_cast<long long>(token));
    } else {
      std::putchar(static_cast<int>(token));
    }
    has_output_ = true;
  }
  void flush() { std::fflush(stdout); }
  void end() {
    std::putchar('\n');
    has_output_ = false, flush();
  }

 private:
  bool ids_, has_output_ = false;
};

int generate(Options of) {
  using Clock = std::chrono::steady_clock;
  const auto device = parse_device(of.device);
  auto model = nn::from_pretrained(of.folder, device);
  if (!of.dtype.empty()) {
    const std::map<std::string, at::ScalarType> dtypes{
        {"float32", at::kFloat}, {"bfloat16", at::kBFloat16}, {"float16", at::kHalf}};
    const auto dtype = dtypes.find(of.dtype);
    TORCH_CHECK_VALUE(dtype != dtypes.end(), "--dtype is ", of.dtype,
                      "; expected float32, bfloat16 or float16");
    model->to(dtype->second);
  }
  const auto vocab_size = model->config.vocab_size;
  TORCH_CHECK_VALUE(of.ids || vocab_size == 256, "vocab_size is ", vocab_size,
                    ": its tokens are not bytes; read and write token ids with --ids");
  for (const auto id : of.eos) {
    TORCH_CHECK_VALUE(id >= 0 && id < vocab_size, "--eos is ", id, "; expected numbers from 0 to ",
                      vocab_size - 1);
  }
  const auto prompts = read_prompts(of, vocab_size);

  // Pad prompts on the left.
  size_t longest = 0;
  for (const auto& prompt : prompts) longest = std::max(longest, prompt.size());
  const auto batch = static_cast<int64_t>(prompts.size()), tokens = static_cast<int64_t>(longest);
  auto ids = at::zeros({batch, tokens}, at::kLong), mask = at::zeros({batch, tokens}, at::kBool);
  for (int64_t i = 0; i < batch; ++i) {
    const auto prompt = at::tensor(prompts[static_cast<size_t>(i)]);
    ids[i].slice(0, tokens - prompt.size(0)).copy_(prompt);
    mask[i].slice(0, tokens - prompt.size(0)).fill_(true);
  }
  auto& options = of.generate;
  if (!mask.all().item<bool>()) options.attention_mask = mask.to(device);
  if (!of.eos.empty()) options.eos_token_id = of.eos;
  if (of.seed) {
    options.generator = at::globalContext().defaultGenerator(device);
    options.generator->set_current_seed(static_cast<uint64_t>(*of.seed));
  }

  // A single text is printed while it is generated; several texts are printed at the end.
  Writer writer(of.ids);
  const auto eos_ids = nn::list_of(options.eos_token_id ? options.eos_token_id : model->config.eos_token_id);
  const auto is_end = [&](int64_t token) { return std::ranges::find(eos_ids, token) != eos_ids.end(); };
  int64_t steps = 0;
  double first_token_seconds = 0.0;
  const auto start_time = Clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(Clock::now() - start_time).count(); };
  const auto put_prompt = [&](int64_t i) {
    for (const auto token : prompts[static_cast<size_t>(i)]) writer.put(token);
  };
  options.on_token = [&](const at::Tensor& next) {
    if (batch == 1) {
      if (steps == 0) put_prompt(0);
      const auto token = next.item<int64_t>();
      if (!is_end(token)) writer.put(token), writer.flush();
    }
    if (++steps > 1) return;
    if (device.is_cuda()) torch::cuda::synchronize();
    first_token_seconds = elapsed();
  };
  const auto text = model->generate(ids.to(device), options).cpu();
  const auto seconds = elapsed();
  if (batch == 1) {
    if (steps == 0) put_prompt(0);
    writer.end();
  } else {
    for (int64_t i = 0; i < batch; ++i) {
      put_prompt(i);
      for (int64_t t = tokens; t < text.size(1); ++t) {
        const auto token = text[i][t].item<int64_t>();
        if (is_end(token)) break;
        writer.put(token);
      }
      writer.end();
    }
  }
  if (!of.quiet && steps > 0) {
    const auto written = static_cast<double>(steps * batch);
    std::fprintf(stderr, "%.0f tokens in %.2f s, %.0f tokens/s; the first after %.2f s", written, seconds,
                 written / seconds, first_token_seconds);
    if (steps > 1) {
      const auto each = (seconds - first_token_seconds) / static_cast<double>(steps - 1);
      std::fprintf(stderr, ", then %.0f tokens/s, %.3f ms a token", static_cast<double>(batch) / each,
                   1e3 * each);
    }
    std::fputc('\n', stderr);
  }
  return 0;
}

}  // namespace
}  // namespace girih::programs

int main(int argc, char** argv) {
  CLI::App app("Continues texts with a language model, as bytes or as token ids.", "girih-generate");
  girih::programs::Options options;
  girih::programs::describe(app, options);
  return girih::programs::run_program(app, argc, argv, [&] { return girih::programs::generate(options); });
}
