"""The files of a finished run: model, sample, curve and result."""

import json
import os
import shutil
from pathlib import Path

import torch

from girih.models import GirihForCausalLM, byte_tokenizer
from girih.training.folder import publish
from girih.training.recipe import Recipe
from girih.training.trainer import BITS, ByteTrainer


def draw_curve(history: list[dict], tokens_per_step: int, held_out: float, title: str, file: Path) -> None:
    """Draws bits per byte over training tokens, and the held-out bits per byte."""
    from matplotlib.figure import Figure

    logs = [log for log in history if "bits" in log]
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.subplots()
    tokens = [log["step"] * tokens_per_step / 1e6 for log in logs]
    axes.plot(tokens, [log["bits"] for log in logs], label="training")
    axes.axhline(held_out, color="C1", linestyle="--", label=f"held out, at the end: {held_out:.3f}")
    axes.set(title=title, xlabel="training tokens (bytes), millions", ylabel="bits per byte", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    draft = file.with_name("part-" + file.name)
    figure.savefig(draft, dpi=150)
    os.replace(draft, file)


@torch.no_grad()
def write_sample(model: GirihForCausalLM, prompt: bytes, length: int, seed: int) -> str:
    """A continuation of `prompt` by `length` bytes."""
    torch.manual_seed(seed)
    ids = torch.tensor([list(prompt)], device=model.device)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=length,
        do_sample=True,
        temperature=0.7,
        top_k=0,
    )
    return bytes(out[0].tolist()).decode(errors="replace")


def bits_by_chunk(trainer: ByteTrainer) -> dict[int, float]:
    """Bits per byte of the held-out text; for an adaptive CAT at each of its chunk lengths."""
    config = trainer.model.config
    default_chunk, bits = config.chunk, {}
    for chunk in config.chunks or [default_chunk]:
        config.chunk = chunk
        bits[chunk] = trainer.evaluate()["eval_loss"] * BITS
    config.chunk = default_chunk
    return bits


def finish(trainer: ByteTrainer, size: Recipe, arguments: dict, folder: Path, prompt: bytes) -> dict:
    """Measure, save the model, write a sample, draw the curve. The result is written last and marks the run
    as finished."""
    config, chunk_bits = trainer.model.config, bits_by_chunk(trainer)
    bits = chunk_bits[config.chunk]
    logs = [log for log in trainer.state.log_history if "tokens_per_second" in log]
    result = {
        "mixer": arguments["mixer"],
        "size": arguments["size"],
        **({"options": arguments["options"]} if "options" in arguments else {}),
        "context": size.context,
        "parameters": trainer.model.num_parameters(),
        "steps": size.steps,
        "tokens": size.steps * trainer.tokens_per_step,
        "bits_per_byte": round(bits, 4),
        **(
            {"bits_per_byte_by_chunk": {str(C): round(x, 4) for C, x in chunk_bits.items()}}
            if config.chunks
            else {}
        ),
        "tokens_per_second": round(len(logs) / sum(1 / log["tokens_per_second"] for log in logs)),
        "corpus": arguments["corpus"],
        "folder": str(folder / "model"),
    }
    if trainer.is_world_process_zero():
        draft = folder / "model.part"
        shutil.rmtree(draft, ignore_errors=True)
        shutil.rmtree(folder / "model", ignore_errors=True)
        trainer.model.save_pretrained(draft)
        byte_tokenizer().save_pretrained(draft)
        os.replace(draft, folder / "model")
        sample = write_sample(trainer.model.eval(), prompt, 256, arguments["seed"])
        publish(folder / "sample.txt", sample)
        print(f"\nA sample, after {len(prompt)} bytes of held-out text:\n\n{sample}\n")
        title = f"{result['mixer']}, {result['parameters'] / 1e6:.2f}M parameters"
        draw_curve(trainer.state.log_history, trainer.tokens_per_step, bits, title, folder / "loss.png")
        publish(folder / "result.json", json.dumps(result, indent=2) + "\n")
        shutil.rmtree(folder / "checkpoints")
    return result
