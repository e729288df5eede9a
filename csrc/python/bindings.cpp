// girih._C: the C++ language model for Python.
#include <girih/language_model.h>
#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;
using girih::nn::LanguageModelImpl;
using girih::nn::MixSchedule;
using girih::nn::Output;
using girih::nn::State;
using girih::nn::TokenIds;
using OptionalTensor = std::optional<at::Tensor>;

namespace {

Output forward(LanguageModelImpl& model, const at::Tensor& input_ids, const OptionalTensor& attention_mask,
               const State& state, bool use_cache, const OptionalTensor& cu_seqlens) {
  return model.forward(input_ids, attention_mask.value_or(at::Tensor()), state, use_cache,
                       cu_seqlens.value_or(at::Tensor()));
}

at::Tensor loss(LanguageModelImpl& model, const at::Tensor& input_ids, const OptionalTensor& labels) {
  return model.loss(input_ids, labels.value_or(at::Tensor()));
}

at::Tensor generate(LanguageModelImpl& model, const at::Tensor& input_ids, int64_t max_new_tokens,
                    double temperature, std::optional<int64_t> top_k,
                    const std::optional<TokenIds>& eos_token_id, const OptionalTensor& attention_mask) {
  return model.generate(input_ids, {.max_new_tokens = max_new_tokens,
                                    .temperature = temperature,
                                    .top_k = top_k,
                                    .eos_token_id = eos_token_id,
                                    .attention_mask = attention_mask.value_or(at::Tensor())});
}

py::dict to_dict(const torch::OrderedDict<std::string, at::Tensor>& tensors) {
  py::dict all;
  for (const auto& item : tensors) all[py::str(item.key())] = item.value();
  return all;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "The language model of girih in C++; `girih.models` has the Hugging Face models.";
  py::class_<State>(m, "State", "The state of the layers of a model between calls.").def(py::init<>());
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<LanguageModelImpl, std::shared_ptr<LanguageModelImpl>>(m, "LanguageModel")
      .def(py::init([](const std::string& json) {
             return std::make_shared<LanguageModelImpl>(girih::nn::Config::from_json(json));
           }),
           py::arg("config"), "A new model from the text of a config.json.")
      .def_static(
          "from_pretrained",
          [](const std::string& folder) { return girih::nn::from_pretrained(folder).ptr(); },
          py::arg("folder"), "Loads the model of a folder that save_pretrained wrote.")
      .def("save_pretrained", &LanguageModelImpl::save_pretrained, py::arg("folder"))
      .def("forward", &forward, py::arg("input_ids"), py::arg("attention_mask") = py::none(),
           py::arg("state") = State(), py::arg("use_cache") = false, py::arg("cu_seqlens") = py::none(),
           no_gil, "input_ids [B, T] -> logits [B, T, vocab_size] and the state.")
      .def("loss", &loss, py::arg("input_ids"), py::arg("labels") = py::none(), no_gil)
      .def("generate", &generate, py::arg("input_ids"), py::arg("max_new_tokens") = 64,
           py::arg("temperature") = 0.0, py::arg("top_k") = py::none(), py::arg("eos_token_id") = py::none(),
           py::arg("attention_mask") = py::none(), no_gil)
      .def("set_chunk", &LanguageModelImpl::set_chunk, py::arg("chunk"))
      .def("named_parameters",
           [](const LanguageModelImpl& model) { return to_dict(model.named_parameters()); })
      .def("named_buffers", [](const LanguageModelImpl& model) { return to_dict(model.named_buffers()); });
  py::class_<MixSchedule>(m, "MixSchedule", "The weight of the mixtures of a model by training step.")
      .def(py::init([](const std::string& schedule, std::optional<double> first, std::optional<double> final,
                       std::optional<int64_t> steps, std::optional<std::vector<double>> levels) {
             return MixSchedule(schedule, {first, final, steps, std::move(levels)});
           }),
           py::arg("schedule") = "gradual", py::kw_only(), py::arg("first") = py::none(),
           py::arg("final") = py::none(), py::arg("steps") = py::none(), py::arg("levels") = py::none())
      .def("weight", &MixSchedule::weight, py::arg("step"))
      .def(
          "set_weights",
          [](const MixSchedule& schedule, const LanguageModelImpl& model, int64_t step) {
            schedule.set_weights(model, step);
          },
          py::arg("model"), py::arg("step"));
}
