"""Exports a trained model as one file for C++: `export.py runs/gsa-small/model model.pt2`.

torch.export and AOTInductor compile everything except the operators of girih, which the C++ program calls in
libgirih.so. The length of a text is dynamic; the batch size is fixed.
"""

import sys

import girih  # noqa: F401  registers the models with transformers
import torch
from transformers import AutoModelForCausalLM

if len(sys.argv) != 3:
    sys.exit("usage: export.py MODEL FILE.pt2")


class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(input_ids=ids, use_cache=False).logits


model = Logits(AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval())
length = torch.export.Dim("length", min=2, max=65536)
with torch.no_grad():
    exported = torch.export.export(
        model, (torch.zeros(1, 64, dtype=torch.long),), dynamic_shapes=({1: length},)
    )
    torch._inductor.aoti_compile_and_package(exported, package_path=sys.argv[2])
