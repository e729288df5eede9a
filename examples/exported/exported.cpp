// Prints the most likely next byte after every byte of a text: exported model.pt2 "def "
// export.py in this folder writes model.pt2.
#include <girih/girih.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <iostream>
#include <string>
#include <vector>

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: exported FILE.pt2 TEXT\n";
    return 1;
  }
  torch::NoGradGuard no_grad;
  torch::inductor::AOTIModelPackageLoader model(argv[1]);
  std::vector<int64_t> bytes;  // one token per byte
  for (unsigned char byte : std::string(argv[2])) bytes.push_back(byte);
  const auto next = model.run({torch::tensor(bytes).unsqueeze(0)})[0][0].argmax(-1);
  for (int64_t i = 0; i < next.size(0); ++i)
    std::cout << next[i].item<int64_t>() << (i + 1 < next.size(0) ? ' ' : '\n');
}
