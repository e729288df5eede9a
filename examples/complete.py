"""Completes a text with a trained model, byte by byte: `complete.py runs/gsa-small/model "def "`.

`examples/complete` is the same program in C++.
"""

import sys

import girih  # noqa: F401  registers the models with transformers
import torch
from transformers import AutoModelForCausalLM

if len(sys.argv) != 3:
    sys.exit("usage: complete.py MODEL TEXT")
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
prompt = torch.tensor([list(sys.argv[2].encode())])  # one token per byte
text = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=100)
print(bytes(text[0].tolist()).decode(errors="replace"))
