// Completes a text with a trained model, byte by byte: complete runs/gsa-small/model "def "
// examples/complete.py is the same program in Python.
#include <girih/girih.h>

#include <iostream>
#include <string>
#include <vector>

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: complete MODEL TEXT\n";
    return 1;
  }
  torch::NoGradGuard no_grad;
  auto model = girih::nn::from_pretrained(argv[1]);
  std::vector<int64_t> bytes;  // one token per byte
  for (unsigned char byte : std::string(argv[2])) bytes.push_back(byte);
  const auto prompt = torch::tensor(bytes).unsqueeze(0);
  const auto text = model->generate(prompt, {.max_new_tokens = 100})[0];
  for (int64_t i = 0; i < text.size(0); ++i) std::cout << static_cast<char>(text[i].item<int64_t>());
  std::cout << '\n';
}
