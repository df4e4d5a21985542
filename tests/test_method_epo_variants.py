"""EPO's variants: schedules and terms worked out by hand, and the bonus alone against EPO."""

import math

import pytest
import torch
from method_batches import micro_of
from trainer_kit import catch_step, difference, make_trainer, with_episodes

from epo_trl.methods import Comm, StepSummary
from epo_trl.methods.epo import EPO, EPODecay, EPOSecondVersion, TurnBand

HISTORY = [3.4, 3.2]
BAND = {"epo_lambda": 0.5, "smoothing_alpha": 0.7, "kappa_low": 0.97, "kappa_high": 1.01}


def row_of(entropy, turn_ids, **changes):
    """Returns a micro-batch of one row of which every token counts; its entropy is a leaf with gradient."""
    return micro_of([turn_ids], entropy=torch.tensor([entropy], requires_grad=True), **changes)


def step(folder, name, *, rl_step=3, kwargs=None, **changes):
    """Returns loss and gradients of RL step `rl_step` of 10, in one micro-batch."""
    kwargs = {name: kwargs} if kwargs else {}
    trainer = with_episodes(make_trainer(folder, entropy_method=[name], method_kwargs=kwargs, **{**BAND, **changes}))
    return catch_step(trainer, history=HISTORY, rl_step=rl_step)


# ------------------------------------------------------------------------------------------------------------ by hand


def test_the_schedule_of_the_second_version_by_hand():
    """K = 10, k_mid = 5: 1 + exp(-3 k / 5); it is Eq. 7 up to k_mid, and has no jump there."""
    new, old = EPOSecondVersion(), EPO()
    for k in range(6):
        assert new.beta(k, 10) == pytest.approx(1 + math.exp(-0.6 * k)) == pytest.approx(old.beta(k, 10))
    assert [new.beta(6, 10), new.beta(10, 10)] == pytest.approx([1 + math.exp(-3.6), 1 + math.exp(-6)])
    assert old.beta(6, 10) == 1.0 and new.beta(12, 10) == new.beta(10, 10) and new.beta(0, 1) == 2.0
    assert EPOSecondVersion(smoothing_beta_start=3.0, smoothing_decay=1.0).beta(5, 10) == pytest.approx(1 + 2 / math.e)


def test_a_decay_over_training_by_hand():
    method = EPODecay(epo_lambda=0.5, over="training", end_weight=0.1, max_turns=3)
    micro = row_of([2.0, 4.0], [0, 0], rl_step=1, total_rl_steps=5)
    assert method.loss(micro).item() == pytest.approx(-0.4 * 3.0)
    metrics = method.end_rl_step(StepSummary(3.0, {0: 3.0}, rl_step=1, total_rl_steps=5))
    assert (
        metrics["epo/lambda"] == metrics["epo/net_coef_above_band"] == pytest.approx(0.4) and metrics["epo/beta"] == 0
    )


def test_a_decay_over_turns_by_hand():
    """max_turns 3, 0.5 falling to 0.1: turns weigh 0.5, 0.3, 0.1, at every RL step."""
    method = EPODecay(epo_lambda=0.5, over="turns", end_weight=0.1, max_turns=3)
    micro = row_of([2.0, 4.0, 1.0, 7.0, 7.0], [0, 0, 1, 2, 2], rl_step=4, total_rl_steps=5)
    loss = method.loss(micro)
    assert loss.item() == pytest.approx(-(0.5 * 3.0 + 0.3 * 1.0 + 0.1 * 7.0) / 3)
    loss.backward()
    want = torch.tensor([[-0.5 / 6, -0.5 / 6, -0.3 / 3, -0.1 / 6, -0.1 / 6]])
    torch.testing.assert_close(micro.entropy.grad, want)
    early = EPODecay(epo_lambda=0.5, over="turns", end_weight=0.1, schedule="cosine", max_turns=2)
    assert early.loss(row_of([2.0, 4.0], [0, 1])).item() == pytest.approx(-(0.5 * 2.0 + 0.1 * 4.0) / 2)


@pytest.mark.parametrize(("penalty", "rl_steps"), [("hinge", 0), ("indicator", 0), ("indicator", 2)])
def test_above_the_band_all_of_the_bonus_is_left_where_the_penalty_has_no_gradient(penalty, rl_steps):
    method = EPO(epo_lambda=0.5, smoothing_alpha=2.0, smoothing_penalty=penalty)
    for _ in range(rl_steps):
        method.history.append(1.0)
    micro = row_of([9.0], [0], rl_step=rl_steps, total_rl_steps=9)
    method.loss(micro).backward()
    metrics = method.end_rl_step(StepSummary(9.0, {0: 9.0}, rl_step=rl_steps, total_rl_steps=9))
    assert metrics["epo/net_coef_above_band"] == -micro.entropy.grad.item() == 0.5


def test_metrics_of_epo_by_hand():
    """Reference 2, band 1 to 3: one token is 0.5 below, two are inside, three are 1, 2 and 3 above."""
    method = EPO(epo_lambda=0.5, smoothing_alpha=2.0, kappa_low=0.5, kappa_high=1.5)
    method.history.append(1.5)
    method.history.append(2.5)
    method.observe(row_of([0.5, 2.0, 2.5, 4.0, 5.0, 6.0], [0, 0, 1, 1, 1, 1], rl_step=5, total_rl_steps=10))
    beta = 1 + math.exp(-3)
    wanted = {
        "lambda": 0.5, "beta": beta, "net_coef_above_band": 0.5 * (1 - 2 * beta),
        "entropy_loss": (2.5 / 2 + 17.5 / 4) / 2, "smoothing_loss": 2.0 * (0.5 / 2 + 6.0 / 4) / 2,
        "share_below_band": 1 / 6, "share_inside_band": 2 / 6, "share_above_band": 3 / 6,
        "reference": 2.0, "turn_deviation": 0.75 + 2.375,
    }  # fmt: skip
    found = method.end_rl_step(StepSummary(20 / 6, {0: 1.25, 1: 4.375}, rl_step=5, total_rl_steps=10))
    assert found == pytest.approx({f"epo/{name}": value for name, value in wanted.items()})


def test_a_band_on_turns_by_hand():
    """Reference 2, band 1 to 3: turn 0 (mean 2, one token above) is inside, turn 1 (mean 5) is 2 above."""
    method = TurnBand(epo_lambda=0.5, smoothing_alpha=2.0, kappa_low=0.5, kappa_high=1.5)
    method.history.append(2.0)
    micro = row_of([0.5, 3.5, 4.0, 6.0], [0, 0, 1, 1], rl_step=0, total_rl_steps=10)  # beta_0 is 2
    loss = method.loss(micro)
    assert loss.item() == pytest.approx(-0.5 * (3.5 - 2.0 * (2.0 * 2.0) / 2))
    loss.backward()
    above = -0.5 / 4 * (1 - 2.0 * 2.0)  # each token weighs 1 / 4; alpha * beta_k is 4
    torch.testing.assert_close(micro.entropy.grad, torch.tensor([[-0.125, -0.125, above, above]]))
    method.observe(micro)
    metrics = method.end_rl_step(StepSummary(3.5, {0: 2.5, 1: 5.0}, rl_step=0, total_rl_steps=10))
    assert (metrics["epo/share_inside_band"], metrics["epo/share_above_band"]) == (0.5, 0.5)
    assert metrics["epo/smoothing_loss"] == pytest.approx(2.0)
    assert metrics["epo/turn_deviation"] == pytest.approx(0.5 + 3.0)


# ------------------------------------------------------------------------------------------------- against EPO itself


def test_the_bonus_alone_is_epo_without_smoothing(tmp_path):
    base, epo = step(tmp_path, "epo-base"), step(tmp_path, "epo", smoothing_alpha=0.0)
    assert difference(base[1], epo[1]) == 0.0 and difference(base[1], step(tmp_path, "epo")[1]) > 1e-3


def test_measures_of_two_ranks_add_up():
    """Each rank has one of two episodes; the sums of both make the step's metrics."""
    method = TurnBand(kappa_high=1.5)
    method.history.append(2.0)
    method.observe(row_of([4.0, 6.0], [0, 0], num_episodes=2.0))
    ranks = Comm(sum=lambda own: own + torch.tensor([0.0, 2, 0, 1, 0, 0.5]))
    metrics = method.end_rl_step(StepSummary(3.5, {}, ranks))
    assert metrics["epo/share_above_band"] == 0.5 and metrics["epo/entropy_loss"] == pytest.approx(5.0 / 2 + 1)
