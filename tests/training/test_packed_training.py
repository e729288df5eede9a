"""Sequences that a collator packs into one row are independent, in training and in evaluation."""

import pytest
import torch
from girih.models import MIXERS, GirihForCausalLM
from small_models import config_of
from transformers import DataCollatorWithFlattening, PreTrainedTokenizerFast

MODELS = {name: {"mixer": name} for name in MIXERS} | {
    "hybrid": {"mixer": ["gsa", "attention", "cat"], "num_hidden_layers": 3}
}
SEQUENCES = [[5, 9, 2, 7, 7, 1], [3], [8, 8, 4, 6, 2, 2, 9, 1, 5], [4, 1]]


def small(mixer, **options):
    sizes = {
        "vocab_size": 32,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_heads": 2,
        "num_slots": 8,
        "chunk": 4,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,  # so that a token of another sequence changes the logits
    }
    return GirihForCausalLM(config_of(mixer=mixer, **(sizes | options)))


@pytest.fixture(params=MODELS)
def model(request):
    torch.manual_seed(0)
    return small(**MODELS[request.param])


def close(a, b, tolerance=1e-5):
    torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


def make_batch(**options):
    batch = DataCollatorWithFlattening(**options)([{"input_ids": ids} for ids in SEQUENCES])
    batch["labels"] = batch["input_ids"].clone()  # also the first tokens, which the model must ignore
    return batch


COLLATORS = {
    "cu_seq_lens_q": {"return_flash_attn_kwargs": True},
    "cu_seq_lens_q alone": {"return_flash_attn_kwargs": True, "return_position_ids": False},
    "seq_idx": {"return_seq_idx": True, "return_position_ids": False},
    "position_ids": {},
    "position_ids from 2": {"position_ids_start": 2},
    "everything": {"return_flash_attn_kwargs": True, "return_seq_idx": True},
}


def separate_outputs(model):
    """Logits of each sequence alone, concatenated, and the mean loss over their tokens."""
    outputs = [(len(ids), model(torch.tensor([ids]))) for ids in SEQUENCES]
    logits = torch.cat([output.logits for _, output in outputs], 1)
    loss, count = 0.0, 0
    for ids, (n, output) in zip(SEQUENCES, outputs, strict=True):
        if n > 1:
            loss = loss + torch.nn.functional.cross_entropy(
                output.logits[0, :-1], torch.tensor(ids[1:]), reduction="sum"
            )
            count += n - 1
    return logits, loss / count


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("form", COLLATORS)
def test_packed_sequences_are_independent(model, form, training):
    model.train(training)
    output = model(**make_batch(**COLLATORS[form]))
    logits, loss = separate_outputs(model)
    close(output.logits, logits)
    close(output.loss, loss)
    assert output.past_key_values is None


def test_gradients_match_separate_sequences(model):
    model(**make_batch(return_flash_attn_kwargs=True)).loss.backward()
    packed = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    separate_outputs(model)[1].backward()
    for name, p in model.named_parameters():
        close(packed[name], p.grad)


def test_base_model_accepts_packed_sequences(model):
    batch = make_batch(return_seq_idx=True)
    del batch["labels"]
    hidden = model.model(**batch).last_hidden_state
    expected = [model.model(torch.tensor([ids])).last_hidden_state for ids in SEQUENCES]
    close(hidden, torch.cat(expected, 1))


def test_bounds_are_not_read_on_the_host():
    """The tensors have no values, so nothing can be read from them."""
    with torch.device("meta"):
        model = small("gsa")
        ids, cu_seqlens = torch.zeros(1, 9, dtype=torch.long), torch.zeros(3, dtype=torch.int32)
        for name in ("cu_seqlens", "cu_seq_lens_q"):
            bounds = {name: cu_seqlens, "position_ids": ids}
            assert model(ids, labels=ids, **bounds).loss.device.type == "meta"
        assert model(ids, labels=ids).loss.device.type == "meta"


@torch.no_grad()
def test_rising_positions_start_no_sequence(model):
    model.eval()
    ids, mask = torch.randint(1, 32, (3, 7)), torch.ones(3, 7, dtype=torch.long)
    mask[1, :4], mask[2, :6] = 0, 0
    expected = model(ids, attention_mask=mask).logits
    padded = mask.cumsum(1) - 1
    for positions in (padded.masked_fill(mask == 0, 0), padded.masked_fill(mask == 0, 1)):
        assert model(ids, attention_mask=mask, position_ids=positions).logits.equal(expected)
    whole = model(ids).logits
    assert model(ids, position_ids=torch.arange(7)[None]).logits.equal(whole)
    assert model(ids, position_ids=torch.arange(7).expand(3, -1)).logits.equal(whole)
    cache = model(ids[:, :3], use_cache=True).past_key_values
    rest = model(ids[:, 3:], past_key_values=cache, position_ids=torch.arange(3, 7)[None], use_cache=True)
    close(rest.logits, whole[:, 3:])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"position_ids": torch.tensor([[0, 1, 3, 4]])}, "position_ids: expected to rise by one"),
        ({"position_ids": torch.tensor([[0, 1, 2]])}, r"position_ids has shape \[1, 3\]; expected \[B, T\]"),
        ({"seq_idx": torch.tensor([0, 0, 1, 1])}, r"seq_idx has shape \[4\]; expected \[B, T\]"),
        (
            {"position_ids": torch.tensor([[0, 1, 0, 1]]), "attention_mask": torch.ones(1, 4)},
            "position_ids starts new sequences .* no attention_mask",
        ),
        (
            {"input_ids": torch.ones(2, 4, dtype=torch.long), "seq_idx": torch.tensor([[0, 0, 1, 1]] * 2)},
            "seq_idx starts new sequences within a row; expected one row",
        ),
        (
            {"cu_seqlens": torch.tensor([0, 4]), "cu_seq_lens_q": torch.tensor([0, 4])},
            "cu_seqlens and cu_seq_lens_q: give one",
        ),
        ({"cu_seq_lens_q": torch.tensor([[0, 4]])}, "cu_seqlens has shape"),
    ],
)
def test_invalid_packing_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        small("gsa")(**({"input_ids": torch.ones(1, 4, dtype=torch.long)} | wrong))


def test_compiled_models_pack_too():
    torch.manual_seed(0)
    model = small("gsa")
    compiled = torch.compile(model, backend="aot_eager")
    for options in ({"return_flash_attn_kwargs": True}, {}):
        torch.compiler.reset()
        close(compiled(**make_batch(**options)).loss, separate_outputs(model)[1])


@pytest.mark.parametrize("mixer", ["gsa", "attention"])
def test_loss_of_sequences_packed_by_trl_matches_separate_sequences(mixer, tmp_path):
    """The import of trl takes about four seconds."""
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from trl import SFTConfig, SFTTrainer

    torch.manual_seed(0)
    model = small(mixer)
    arguments = SFTConfig(
        output_dir=str(tmp_path),
        packing=True,
        max_length=32,
        per_device_train_batch_size=4,
        max_steps=1,
        learning_rate=0.0,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
    )
    data = Dataset.from_dict({"input_ids": SEQUENCES})
    words = Tokenizer(WordLevel({str(i): i for i in range(32)}, unk_token="0"))
    words = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="31")
    trainer = SFTTrainer(
        model=model, args=arguments, train_dataset=data, eval_dataset=data, processing_class=words
    )
    trainer.train()
    expected = separate_outputs(model)[1].item()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(expected, abs=1e-4)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, abs=1e-4)
