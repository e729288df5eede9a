"""A trained model goes on with a text, byte by byte: `complete.py runs/gsa-small/model "def "`.

`examples/complete` is the same in C++.
"""

import sys

import girih  # noqa: F401  makes the models known to transformers
import torch
from transformers import AutoModelForCausalLM

if len(sys.argv) != 3:
    sys.exit("usage: complete.py MODEL TEXT")
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
prompt = torch.tensor([list(sys.argv[2].encode())])  # a byte is a token
text = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=100)
print(bytes(text[0].tolist()).decode(errors="replace"))
