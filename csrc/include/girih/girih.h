// All of girih for C++: the operators (girih::ops) and the layers and language models (girih::nn).
#pragma once

#include <girih/language_model.h>
#include <girih/nn.h>
#include <girih/ops.h>
