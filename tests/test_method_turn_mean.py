"""The mean over turns: factors by hand, over ranks, and gradients in plain loops, however the batch is cut."""

import pytest
import torch
from method_batches import batch_of
from plain_steps import assert_gradient, plain_tokens, step_of
from trainer_kit import compute_in_float64, make_model

from epo_trl.methods.turn_mean import TurnMean


def test_two_turns_of_1_and_9_tokens_count_a_half_each():
    """In a mean over 10 tokens their factors are 5 and 5/9."""
    batch = batch_of([[0] + [1] * 9])
    for over in ("turns", "episodes"):
        shaped = TurnMean(over).modify_advantages(torch.ones(1, 10), batch)
        torch.testing.assert_close(shaped.advantages, torch.tensor([[5.0] + [5 / 9] * 9]))
        assert shaped.metrics == pytest.approx({"turn-mean/factor_min": 5 / 9, "turn-mean/factor_max": 5.0})


@pytest.mark.parametrize(
    ("over", "shares"),
    [
        ("turns", [[1 / 3, 1 / 6, 1 / 6, 0], [1 / 9, 1 / 9, 0, 1 / 9]]),
        ("episodes", [[1 / 4, 1 / 8, 1 / 8, 0], [1 / 6, 1 / 6, 0, 1 / 6]]),
    ],
)
def test_by_hand(over, shares):
    """Turns of one and two tokens, then one of three around a prompt's token; a third episode carries no signal."""
    batch = batch_of(
        [[0, 1, 1, -1], [0, 0, 0, 0], [0, 0, 1, 1]], mask=[[1, 1, 1, 0], [1, 1, 0, 1], [0, 0, 0, 0]]
    )  # fmt: skip
    advantages = torch.tensor([[2.0] * 4, [-3.0] * 4, [7.0] * 4])
    got = TurnMean(over).modify_advantages(advantages, batch).advantages
    torch.testing.assert_close(got / 6, advantages * torch.tensor([*shares, [0.0] * 4]))  # 6 tokens


@pytest.mark.parametrize(
    ("over", "context", "micro_batches"), [("turns", "windowed", 4), ("episodes", "concatenated", 1)]
)
def test_the_gradient_is_that_of_plain_loops(tmp_path, monkeypatch, over, context, micro_batches):
    compute_in_float64(monkeypatch)
    settings = {"policy_method": ["turn-mean"], "method_kwargs": {"turn-mean": {"over": over}}}
    assert_gradient(
        step_of(tmp_path, context, micro_batches, **settings), model := make_model().double(),
        mean_over(over, plain_tokens(model, context)),
    )  # fmt: skip


def mean_over(over, tokens):
    turns = {}
    for token in tokens:
        turns.setdefault((token.row, token.turn), []).append(-token.advantage * token.logp)
    means = {key: sum(losses) / len(losses) for key, losses in turns.items()}
    if over == "turns":
        return sum(means.values()) / len(means)
    rows = {row for row, _ in means}
    return sum(average([x for (i, _), x in means.items() if i == row]) for row in rows) / len(rows)


def average(values):
    return sum(values) / len(values)
