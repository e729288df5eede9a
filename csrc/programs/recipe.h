// Model sizes and their training settings. The build embeds python/girih/training/recipes.json in the
// program.
#pragma once

#include <girih/language_model.h>

#include <string>
#include <vector>

namespace girih::programs {

struct Recipe {
  int64_t parameters, layers, heads, head_dim, slots;
  int64_t context, batch, steps;  // tokens of a sequence, sequences of a step, training steps
  double learning_rate;
  int64_t held_out;  // windows of the evaluation
};

// The recipe of a size. Throws c10::ValueError with the known sizes for an unknown one.
Recipe recipe_of(const std::string& size);

int64_t count_parameters(const nn::LanguageModel& model);

// The recipe with another sequence length; the tokens of a step and the held-out tokens stay the same.
Recipe with_context(Recipe size, int64_t context);

// The configuration of a byte-level model with `size.parameters` parameters. The width of the MLPs is fitted,
// within 2 percent of the parameters; if no block has an MLP, the number of layers is fitted, within half a
// layer. mixer: a name, or several names, separated by commas, that alternate over the layers. chunks: of an
// adaptive CAT model, or empty. options: other fields of the configuration, "chunk=1 phi=identity".
nn::Config config_of_size(const std::string& mixer, const Recipe& size,
                          const std::vector<int64_t>& chunks = {}, const std::string& options = {});

// Factor of the learning rate at a step: linear warm-up over a twentieth of the steps, then a cosine to zero.
double rate_at(int64_t step, int64_t steps);

}  // namespace girih::programs
