"""Muon next to AdamW: against `torch.optim.Muon`, and in a warm start that resumes."""

import shutil

import pytest
import torch
from trainer_kit import make_warm_start
from transformers import LlamaConfig, LlamaForCausalLM

from epo_trl.models.muon import make_muon, orthogonalize


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, tie_word_embeddings=False,
        )
    )  # fmt: skip


def train(model: LlamaForCausalLM, optimizers: list, steps: int) -> None:
    batches = torch.Generator().manual_seed(1)
    for _ in range(steps):
        ids = torch.randint(50, (4, 12), generator=batches)
        model(input_ids=ids, labels=ids).loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()


@pytest.mark.parametrize("shape", [(16, 16), (16, 40), (40, 16)])
def test_singular_values_move_to_one_and_directions_stay(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    middle = left.T @ orthogonalize(matrix) @ right.T
    assert middle.diagonal().min() > 0.6 and middle.diagonal().max() < 1.3
    assert (middle - middle.diagonal().diag()).abs().max() < 1e-3


def test_steps_are_those_of_torch():
    """`torch.optim.Muon` iterates in bfloat16, hence the tolerance: 2 % of what the weights move."""
    ours, theirs = make_model(), make_model()
    start = {name: p.detach().clone() for name, p in ours.named_parameters()}
    train(ours, [make_muon(ours, lr=1e-3, matrix_lr=2e-2, weight_decay=0.1, betas=(0.9, 0.98))], 3)
    hidden = {name: p for name, p in theirs.named_parameters() if "proj" in name}
    other = [p for name, p in theirs.named_parameters() if name not in hidden]
    train(
        theirs,
        [
            torch.optim.Muon(hidden.values(), lr=2e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(other, lr=1e-3, betas=(0.9, 0.98), weight_decay=0.0),
        ],
        3,
    )
    assert len(hidden) == 14 and len(other) == 7
    for name, expected in theirs.named_parameters():
        value, moved = dict(ours.named_parameters())[name], (expected - start[name]).norm()
        assert moved > 0
        assert (value - expected).norm() < 0.05 * moved, name


def test_a_warm_start_with_muon_resumes_with_equal_weights(tmp_path):
    rows = [[3 + (i * k) % 7 for k in range(1, 9)] for i in range(16)]
    settings = {"muon_learning_rate": 1e-2, "learning_rate": 1e-3, "weight_decay": 0.1}
    whole = make_warm_start(tmp_path / "whole", rows, **settings)
    whole.train_to_end()
    assert [group["muon"] for group in whole.optimizer.param_groups] == [False, True]
    shutil.copytree(tmp_path / "whole" / "checkpoint-1", tmp_path / "cut" / "checkpoint-1")
    resumed = make_warm_start(tmp_path / "cut", rows, **settings)
    resumed.train_to_end()
    plain = make_warm_start(tmp_path / "plain", rows, learning_rate=1e-3, weight_decay=0.1)
    plain.train_to_end()
    weights, again, other = (list(trainer.model.parameters()) for trainer in (whole, resumed, plain))
    assert all(torch.equal(a, b) for a, b in zip(weights, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(weights, other, strict=True))
