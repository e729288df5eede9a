// The sizes of model and how each is trained: python/girih/training/recipes.json, which the build puts into
// the program.
#pragma once

#include <girih/language_model.h>

#include <string>
#include <vector>

namespace girih::programs {

struct Recipe {
  int64_t parameters, layers, heads, head_dim, slots;
  int64_t context, batch, steps;  // tokens, sequences
  double learning_rate;
  int64_t held_out;  // windows
};

// Throws c10::ValueError, which names those that there are.
Recipe recipe_of(const std::string& size);

int64_t count_parameters(const nn::LanguageModel& model);

// The recipe with sequences of another length, and as many tokens a step and held out as before.
Recipe with_context(Recipe size, int64_t context);

// A byte-level model of `size.parameters` parameters, within 2 percent: the width of its MLPs is fitted.
// Where no mixer's blocks have an MLP the number of layers is, which comes within half a layer.
// mixer: a name, or several with commas that take turns over the layers. chunks: of an adaptive CAT, or
// empty. options: other fields of the configuration, "chunk=1 phi=identity".
nn::Config config_of_size(const std::string& mixer, const Recipe& size,
                          const std::vector<int64_t>& chunks = {}, const std::string& options = {});

// The share of the highest learning rate that a step trains with: up over a twentieth of the steps, then down
// a cosine to zero.
double rate_at(int64_t step, int64_t steps);

}  // namespace girih::programs
