"""A transformers model with its linear layers accelerated by girih: the same weights and the same text.

python examples/accelerate_model.py                  a small random Qwen3-Next, on the CPU or a GPU
python examples/accelerate_model.py Qwen/Qwen3-Next-80B-A3B-Instruct "A girih is"

(The file is not named accelerate.py, because that name would shadow the package accelerate.)
"""

import sys
import time

import girih
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3NextConfig, Qwen3NextForCausalLM

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def small_model():
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=256,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        intermediate_size=256,
        mlp_only_layers=[0, 1, 2, 3],
    )
    return Qwen3NextForCausalLM(config), torch.randint(256, (1, 300))


def load_model(name, prompt):
    tokenizer = AutoTokenizer.from_pretrained(name)
    return AutoModelForCausalLM.from_pretrained(name, dtype="auto"), tokenizer(
        prompt, return_tensors="pt"
    ).input_ids


def generate(model, ids):
    started = time.perf_counter()
    text = model.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=-1, pad_token_id=0)
    return text, time.perf_counter() - started


def main():
    model, ids = load_model(*sys.argv[1:3]) if len(sys.argv) > 2 else small_model()
    model, ids = model.to(DEVICE).eval(), ids.to(DEVICE)
    before, seconds = generate(model, ids)
    acceleration = girih.accelerate(model)
    print(acceleration.report())
    after, faster = generate(model, ids)
    print(f"unmodified {seconds:.2f} s, accelerated {faster:.2f} s, the same text: {after.equal(before)}")
    acceleration.undo()


if __name__ == "__main__":
    main()
