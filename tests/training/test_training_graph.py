"""A training step in a CUDA graph. Nothing in the step waits for the host, and its replay computes the same
numbers."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from conftest import needs_cuda
from girih.models import MIXERS, GirihForCausalLM
from small_models import config_of

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))


@needs_cuda
@pytest.mark.parametrize("mixer", MIXERS)
def test_replayed_steps_match_eager_steps(mixer):
    from train_speed import capture_graph, training_step

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_heads": 2, "num_hidden_layers": 2}
    model = GirihForCausalLM(config_of(mixer=mixer, loss_in_chunks=True, **sizes)).cuda().train()
    eager_model = copy.deepcopy(model)
    batches = torch.randint(64, (6, 2, 96), device="cuda")

    def optimizer_of(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True, capturable=True)

    ids = batches[0].clone()
    replay = capture_graph(model, optimizer_of(model), ids)
    optimizer = optimizer_of(eager_model)
    for batch in batches[[0, 0, 0]]:  # the three steps before the capture
        training_step(eager_model, optimizer, batch)
    for batch in batches[1:]:
        ids.copy_(batch)
        loss = replay()
        assert loss.equal(training_step(eager_model, optimizer, batch))
    for a, b in zip(model.parameters(), eager_model.parameters(), strict=True):
        assert a.equal(b)
