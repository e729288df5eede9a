// Trains a small language model on a text, byte by byte, and completes the beginning of the text:
//   train TEXT MODEL [STEPS]
// from_pretrained reads the folder MODEL in C++ and in Python. girih-train has more features: a held-out
// part, checkpoints and a schedule.
#include <girih/girih.h>
#include <torch/torch.h>

#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

constexpr int64_t kBatch = 8, kContext = 128;

girih::nn::AdamW optimizer_of(const torch::nn::Module& model) {
  const auto with_decay = [](double decay) {
    return std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(3e-3).weight_decay(decay));
  };
  const auto [decayed, undecayed] = girih::nn::weight_decay_groups(model);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(decayed, with_decay(0.1));
  groups.emplace_back(undecayed, with_decay(0.0));
  return girih::nn::AdamW(std::move(groups));
}

int main(int argc, char** argv) {
  if (argc != 3 && argc != 4) {
    std::cerr << "usage: train TEXT MODEL [STEPS]\n";
    return 1;
  }
  std::ifstream file(argv[1], std::ios::binary);
  std::vector<int64_t> bytes;  // one token per byte
  for (std::istreambuf_iterator<char> byte(file), end; byte != end; ++byte)
    bytes.push_back(static_cast<unsigned char>(*byte));
  const auto text = torch::tensor(bytes);
  if (text.size(0) < kContext) {
    std::cerr << argv[1] << ": " << text.size(0) << " bytes are too few, " << kContext << " are needed\n";
    return 1;
  }

  torch::manual_seed(0);
  girih::nn::LanguageModel model(
      girih::nn::Config{.hidden_size = 64, .num_hidden_layers = 2, .mixer = "gsa"});
  auto optimizer = optimizer_of(*model);
  const int steps = argc == 4 ? std::stoi(argv[3]) : 200;
  for (int step = 1; step <= steps; ++step) {
    const auto starts = torch::randint(text.size(0) - kContext + 1, {kBatch, 1}, torch::kLong);
    const auto loss = model->loss(text.index({starts + torch::arange(kContext)}));
    optimizer.zero_grad();
    loss.backward();
    torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
    optimizer.step();
    if (step % 20 == 0) std::cerr << "step " << step << ", loss " << loss.item<double>() << '\n';
  }
  model->save_pretrained(argv[2]);

  const auto prompt = text.slice(0, 0, 16).unsqueeze(0);  // [batch, tokens]
  const auto generated = model->generate(prompt, {.max_new_tokens = 100})[0];
  for (int64_t i = 0; i < generated.size(0); ++i)
    std::cout << static_cast<char>(generated[i].item<int64_t>());
  std::cout << '\n';
}
