"""Injects a linear memory beside the attention of a trained Transformer and trains it with LoRA.

make train MIXER=attention                 a Transformer of 1.8M parameters, in runs/attention-small
python examples/inject_memory.py           three or four minutes on a core of a CPU
python examples/inject_memory.py FOLDER    the folder of another run of `make train MIXER=attention`

Prints held-out bits per byte of the Transformer, of the model right after the injection, and of the model
after fine-tuning with LoRA. The Transformer fine-tuned alone in the same way is the baseline: it separates
the effect of the memory from the effect of further training.
"""

import math
import sys
import tempfile
from pathlib import Path

import girih
import torch
from girih.data import Windows, read_corpus
from girih.models import GirihForCausalLM
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Trainer, TrainingArguments, set_seed
from transformers.utils.logging import disable_progress_bar

STEPS, BATCH, CONTEXT = 150, 8, 256
PROMPT = b"def read(self, "


def bits(model, windows):
    """Held-out bits per byte."""
    model.eval()
    rows = [windows[i] for i in range(len(windows))]
    with torch.no_grad():
        losses = [
            model(
                **{name: torch.stack([row[name] for row in rows[i : i + BATCH]]) for name in rows[0]}
            ).loss.item()
            for i in range(0, len(rows), BATCH)
        ]
    return sum(losses) / len(losses) / math.log(2)


def fine_tune(model, text, folder, *callbacks):
    """LoRA on the projections that both paths share; peft saves the injected modules whole
    (modules_to_save)."""
    injected = any(name.endswith(".girih") for name, _ in model.named_modules())
    lora = LoraConfig(
        r=8,
        lora_alpha=16,
        lora_dropout=0.05,
        target_modules=["qkv_proj", "o_proj"],
        modules_to_save=["girih"] if injected else None,
    )
    adapted = get_peft_model(model, lora)
    trainable, every = adapted.get_nb_trainable_parameters()
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=2e-3,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        max_grad_norm=1.0,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=50,
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    windows = Windows.drawn(text, STEPS * BATCH, CONTEXT, seed=1)
    Trainer(model=adapted, args=arguments, train_dataset=windows, callbacks=list(callbacks)).train()
    print(f"trained {trainable:,} of {every:,} parameters")
    return adapted


def main():
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/attention-small", "model")
    if not folder.is_dir():
        sys.exit(f"{folder}: no such folder; `make train MIXER=attention` writes runs/attention-small")
    set_seed(0)
    disable_progress_bar()
    corpus = read_corpus()
    held_out = Windows.spread(corpus.held_out, 64, CONTEXT)

    transformer = GirihForCausalLM.from_pretrained(folder)
    results = {"the Transformer": bits(transformer, held_out)}
    with tempfile.TemporaryDirectory() as scratch:
        adapted = fine_tune(transformer, corpus.train, scratch)
        results["the Transformer, fine-tuned by LoRA"] = bits(adapted, held_out)

        model = GirihForCausalLM.from_pretrained(folder)
        girih.inject(model, n=2, virtual_tokens="derivative", gate="k", weight=0.0)
        results["with the memory, at weight 0"] = bits(model, held_out)
        for mixture in model.modules():
            if isinstance(mixture, girih.nn.MemoryAsGate):
                mixture.set_weight(0.5)
        results["with the memory, at weight 0.5, before training"] = bits(model, held_out)
        model.save_pretrained(f"{scratch}/injected")
        schedule = girih.MixSchedule("gradual", first=0.01, final=0.5, steps=100)
        adapted = fine_tune(model, corpus.train, scratch, schedule)
        results["with the memory, at weight 0.5, fine-tuned by LoRA"] = bits(adapted, held_out)
        adapted.save_pretrained(f"{scratch}/adapter")

        # A user of the result loads the injected model and the adapter.
        loaded = PeftModel.from_pretrained(girih.from_pretrained(f"{scratch}/injected"), f"{scratch}/adapter")
        results["the same, saved and loaded"] = bits(loaded, held_out)
        ids = torch.tensor([list(PROMPT)])
        text = loaded.generate(input_ids=ids, max_new_tokens=120, do_sample=False)

    for name, value in results.items():
        print(f"{value:.4f} bits a byte  {name}")
    print(bytes(text[0].tolist()).decode(errors="replace"))


if __name__ == "__main__":
    main()
