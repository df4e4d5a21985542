"""The objective against arXiv 2509.22576, worked out from the equations: by hand, by plain loops, by differences.

Notation: H entropy of a token (nats), n_t tokens of turn t, T_j turns of trajectory j, B trajectories, k RL step of K.
"""

import json
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from epo_trl.objectives import EntropyHistory, band_shares, beta_schedule, smoothing_penalty, turn_mean_weights

BAND = {"kappa_low": 0.5, "kappa_high": 2.0}
F64 = torch.float64


def random_batch(seed: int, *, rows: int = 5, length: int = 24) -> tuple[Tensor, Tensor, Tensor]:
    """Returns `turn_ids, response_mask, entropy`: prompt tokens before each response, padding, one silent row."""
    rng = random.Random(seed)
    turn_ids = torch.full((rows, length), -1)
    mask = torch.zeros(rows, length, dtype=torch.long)
    for row in range(rows):
        position = 0
        for turn in range(rng.randint(1, 4)):
            prompt, response = rng.randint(0, 3), rng.randint(1, 3)
            turn_ids[row, position : position + prompt + response] = turn
            mask[row, position + prompt : position + prompt + response] = row != 1  # row 1 says nothing
            position += prompt + response
    generator = torch.Generator().manual_seed(seed)
    return turn_ids, mask, 3 * torch.rand(rows, length, dtype=F64, generator=generator)


def loop_mean(turn_ids: Tensor, mask: Tensor, value: Tensor) -> float:
    """Eq. 4 read aloud: mean over trajectories of the mean over turns of the mean over response tokens."""
    trajectories = []
    for row in range(value.shape[0]):
        turns: dict[int, list[float]] = {}
        for position in range(value.shape[1]):
            if mask[row, position]:
                turns.setdefault(int(turn_ids[row, position]), []).append(float(value[row, position]))
        if turns:
            trajectories.append(sum(sum(tokens) / len(tokens) for tokens in turns.values()) / len(turns))
    return sum(trajectories) / len(trajectories)


def epo_term(
    entropy: Tensor, turn_ids: Tensor, mask: Tensor, *, coef: float, beta: float, alpha: float, reference: float = 1.0
) -> Tensor:
    """Returns `-lambda * (L_H - beta_k * L_smooth)`."""
    weights = turn_mean_weights(turn_ids, mask, dtype=entropy.dtype)
    penalty = smoothing_penalty(entropy, reference, alpha=alpha, **BAND)
    return -coef * ((weights * entropy).sum() - beta * (weights * penalty).sum())


# ------------------------------------------------------------------------------------------------ Eq. 7: the schedule


@pytest.mark.parametrize(
    ("k", "total", "end", "expected"),
    [
        (0, 150, 1.0, 2.0),  # 2 - 1 * (1 - e^0)
        (25, 150, 1.0, 1.367879441171442),  # 2 - (1 - e^(-3 * 25/75)) = 1 + e^-1
        (50, 150, 1.0, 1.135335283236613),  # 1 + e^-2
        (75, 150, 1.0, 1.049787068367864),  # k = k_mid: 1 + e^-3
        (76, 150, 1.0, 1.0),  # second half with end = 1: 1 + 0
        (150, 150, 1.0, 1.0),
        (1, 5, 0.5, 1.223130160148430),  # k_mid = floor(5/2) = 2: 1 + e^-1.5
        (2, 5, 0.5, 1.049787068367864),  # 1 + e^-3
        (3, 5, 0.5, 0.683939720585721),  # 1 - 0.5 * (1 - e^-1), as (3 - 2) / (5 - 2) = 1/3
        (5, 5, 0.5, 0.524893534183932),  # 1 - 0.5 * (1 - e^-3)
    ],
)
def test_schedule_by_hand(k, total, end, expected):
    assert beta_schedule(k, total, start=2.0, end=end, decay=3.0) == pytest.approx(expected, abs=1e-14)


# ------------------------------------------------------------------------------------------------- Eq. 5: the penalty


def test_penalty_by_hand():
    # reference 1, band [0.5, 2], alpha 0.1:  0.2 lies 0.3 below, 3.5 lies 1.5 above, the edges are inside
    entropy = torch.tensor([[0.2, 0.5, 1.0], [2.0, 2.5, 3.5]], dtype=F64)
    hinge = smoothing_penalty(entropy, 1.0, alpha=0.1, **BAND)
    torch.testing.assert_close(hinge, torch.tensor([[0.03, 0.0, 0.0], [0.0, 0.05, 0.15]], dtype=F64))
    indicator = smoothing_penalty(entropy, 1.0, alpha=0.1, kind="indicator", **BAND)
    torch.testing.assert_close(indicator, torch.tensor([[0.1, 0.0, 0.0], [0.0, 0.1, 0.1]], dtype=F64))


@pytest.mark.parametrize("kind", ["hinge", "indicator"])
def test_penalty_without_history_is_zero_and_harmless(kind):
    entropy = torch.tensor([0.1, 5.0], dtype=F64, requires_grad=True)
    nothing = smoothing_penalty(entropy, None, alpha=0.1, kind=kind, **BAND)
    assert nothing.shape == entropy.shape and nothing.dtype == F64 and not nothing.any()
    # history for the first token only: [1.0, NaN]
    reference = torch.tensor([1.0, math.nan])
    half = smoothing_penalty(entropy, reference, alpha=0.1, kind=kind, **BAND)
    assert half.tolist() == pytest.approx([0.04 if kind == "hinge" else 0.1, 0.0])
    (entropy.sum() + half.sum()).backward()
    assert entropy.grad.tolist() == pytest.approx([0.9 if kind == "hinge" else 1.0, 1.0])


def test_hinge_gradient_is_minus_alpha_below_zero_inside_plus_alpha_above():
    entropy = torch.tensor([0.2, 0.51, 1.0, 1.99, 3.5], dtype=F64, requires_grad=True)
    smoothing_penalty(entropy, 1.0, alpha=0.1, **BAND).sum().backward()
    assert entropy.grad.tolist() == pytest.approx([-0.1, 0.0, 0.0, 0.0, 0.1], abs=0)


def test_hinge_carries_gradient_to_the_logits():
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(3, 4, 6, dtype=F64, generator=generator)).requires_grad_()
    turn_ids = torch.tensor([[0, 0, 1, 1], [0, 0, 0, -1], [0, 1, 1, 2]])
    mask = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 0], [1, 1, 1, 1]])

    def entropy_of(logits: Tensor) -> Tensor:
        logp = logits.log_softmax(-1)
        return -(logp.exp() * logp).sum(-1)

    def term(logits: Tensor) -> Tensor:  # the band is [0.3, 1.2]
        return epo_term(entropy_of(logits), turn_ids, mask, coef=0.3, beta=1.5, alpha=0.8, reference=0.6)

    entropy = entropy_of(logits.detach())
    assert all(band_shares(entropy, 0.6, mask, **BAND) > 0)  # each branch occurs
    assert not (((entropy - 0.3).abs() < 1e-3) | ((entropy - 1.2).abs() < 1e-3)).any()  # no kink within a difference
    assert torch.autograd.gradcheck(term, (logits,), eps=1e-6, atol=1e-8)


@given(
    entropy=st.lists(st.floats(0, 12), min_size=1, max_size=8),
    reference=st.floats(0, 6),
    low=st.floats(0, 1),
    width=st.floats(0, 3),
    alpha=st.floats(0, 2),
)
def test_penalty_agrees_with_a_plain_loop(entropy, reference, low, width, alpha):
    high = low + width
    hinge, indicator = (
        smoothing_penalty(
            torch.tensor(entropy, dtype=F64), reference, kappa_low=low, kappa_high=high, alpha=alpha, kind=kind
        ).tolist()
        for kind in ("hinge", "indicator")
    )
    for h, got, flag in zip(entropy, hinge, indicator, strict=True):
        expected = alpha * (max(0.0, low * reference - h) + max(0.0, h - high * reference))
        assert got == pytest.approx(expected, abs=1e-12)
        assert flag == (alpha if h < low * reference or h > high * reference else 0.0)


def test_band_shares_by_hand():
    entropy = torch.tensor([[0.2, 0.5, 2.0, 2.1], [9.0, 0.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]])
    reference = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, math.nan]])
    # below: 0.2, 0.0; above: 2.1 and one 9; inside: both edges and the one without history
    assert band_shares(entropy, reference, mask, **BAND).tolist() == [2, 3, 2]
    assert band_shares(entropy, None, mask, **BAND).tolist() == [0, 7, 0]


# ---------------------------------------------------------------------------------------------- Eq. 4, 6: aggregation


def test_weights_by_hand():
    #  row 0: turn 0 says 1, 3 (mean 2), turn 1 says 4 (mean 4)      -> 3      weights 1/(2*2*2), 1/(1*2*2)
    #  row 1: turn 0 says 0.5, 1, 1.5 (mean 1)                       -> 1      weights 1/(3*1*2)
    #  mean of both                                                  -> 2      (the mean over all tokens is 11/6)
    turn_ids = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, -1]])
    mask = torch.tensor([[1, 1, 0, 0, 1], [0, 1, 1, 1, 0]])
    entropy = torch.tensor([[1.0, 3.0, 50.0, 50.0, 4.0], [50.0, 0.5, 1.0, 1.5, 50.0]])
    weights = turn_mean_weights(turn_ids, mask)
    expected = torch.tensor([[1 / 8, 1 / 8, 0, 0, 1 / 4], [0, 1 / 6, 1 / 6, 1 / 6, 0]])
    torch.testing.assert_close(weights, expected)
    assert (weights * entropy).sum().item() == pytest.approx(2.0)
    renamed = torch.where(turn_ids >= 0, 3 * turn_ids + 7, turn_ids)  # beyond the number of columns
    assert torch.equal(turn_mean_weights(renamed, mask), weights)


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6))
def test_weighted_sum_is_the_nested_mean_of_the_paper(seed):
    turn_ids, mask, entropy = random_batch(seed)
    weights = turn_mean_weights(turn_ids, mask, dtype=F64)
    assert float((weights * entropy).sum()) == pytest.approx(loop_mean(turn_ids, mask, entropy), rel=1e-12)
    assert float(weights.sum()) == pytest.approx(1.0)
    assert not weights[mask == 0].any()
    # Eq. 6 aggregates the penalty in the same way
    penalty = smoothing_penalty(entropy, 1.0, alpha=0.1, **BAND)
    assert float((weights * penalty).sum()) == pytest.approx(loop_mean(turn_ids, mask, penalty), rel=1e-12)


@pytest.mark.parametrize("sizes", [[1, 1, 1, 1, 1], [2, 3]])
def test_parts_that_know_the_number_of_trajectories_add_up(sizes):
    turn_ids, mask, _ = random_batch(0)
    whole = turn_mean_weights(turn_ids, mask, dtype=F64)
    for number in (4, torch.tensor(4.0)):  # row 1 of the 5 is silent
        parts = [
            turn_mean_weights(t, m, num_trajectories=number, dtype=F64)
            for t, m in zip(turn_ids.split(sizes), mask.split(sizes), strict=True)
        ]
        torch.testing.assert_close(torch.cat(parts), whole)


# ------------------------------------------------------------------------------------------------ W_k: the history


def test_history_per_step_is_the_mean_of_all_past_steps():
    history = EntropyHistory()
    assert history.reference() is None
    for value, mean in ((1.0, 1.0), (2.0, 1.5), (6.0, 3.0)):
        history.append(value)
        assert history.reference() == pytest.approx(mean)
    assert len(history) == 3
    assert history.reference(torch.tensor([[0, -1]])) == pytest.approx(3.0)  # turn ids do not matter here


def test_history_forgets_what_has_left_the_window():
    history = EntropyHistory(window=2)
    for value in (9.0, 1.0, 2.0):
        history.append(value)
    assert history.reference() == pytest.approx(1.5)


def test_history_per_turn_by_hand():
    history = EntropyHistory(per="turn")
    turn_ids = torch.tensor([[0, 0, 1, 2], [3, 100, -1, -1]])
    assert torch.isnan(history.reference(turn_ids)).all()
    history.append({0: 1.0, 1: 2.0})
    history.append({0: 3.0, 3: 0.25})
    # turn 0: (1 + 3) / 2; turn 1 and turn 3 occurred in one step only; turns 2 and 100 and padding never
    got = history.reference(turn_ids)
    expected = torch.tensor([[2.0, 2.0, 2.0, math.nan], [0.25, math.nan, math.nan, math.nan]])
    torch.testing.assert_close(got, expected, equal_nan=True)


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize(
    ("per", "values"), [("step", [0.1, 0.7, 0.3]), ("turn", [{0: 0.1, 11: 0.3}, {2: 0.7}, {0: 0.9}])]
)
def test_history_continues_after_a_round_trip_through_json(per, values, window):
    history, again = EntropyHistory(per=per, window=window), EntropyHistory(per=per, window=window)
    again.append(values[1])  # what was there is replaced
    for value in values:
        history.append(value)
    again.load_state_dict(json.loads(json.dumps(history.state_dict())))
    turn_ids = torch.tensor([0, 2, 11, -1])
    for _ in range(2):
        one, other = (torch.as_tensor(h.reference(turn_ids)) for h in (history, again))
        assert torch.equal(one.nan_to_num(-1), other.nan_to_num(-1))
        assert (len(again), again.total_appended) == (len(history), history.total_appended)
        for h in (history, again):
            h.append(values[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_a_long_turn_are_right_in_a_narrow_dtype(dtype):
    tokens = 4000  # more than a bfloat16 (256) or float16 (2048) can count one by one
    weights = turn_mean_weights(torch.zeros(1, tokens, dtype=torch.long), torch.ones(1, tokens), dtype=dtype)
    assert weights.dtype == dtype
    assert float(weights.double().sum()) == pytest.approx(1.0, rel=0.01)
