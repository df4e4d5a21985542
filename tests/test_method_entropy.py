"""Entropy-based advantages and the adaptive coefficient: by hand, and as a gradient."""

import math

import pytest
import torch
from method_batches import batch_of
from trainer_kit import catch_step, difference, largest, make_trainer, with_episodes

from epo_trl.methods import StepSummary
from epo_trl.methods.adaptive import AdaptiveEntropy
from epo_trl.methods.ea import EntropyAdvantage


def trainer_of(folder, **changes):
    return with_episodes(make_trainer(folder, **changes))


def test_entropy_based_advantages_by_hand():
    """alpha 0.4, kappa 2: min(0.4 H, |A| / 2). The sign of A never turns, an advantage of 0 stays."""
    advantages, entropy = torch.tensor([[2.0, 2.0, -1.0, -1.0, 0.0]]), torch.tensor([[0.5, 5.0, 0.5, 5.0, 3.0]])
    shaped = EntropyAdvantage().modify_advantages(advantages, batch_of([[0] * 5], entropy=entropy)).advantages
    torch.testing.assert_close(shaped, torch.tensor([[2.2, 3.0, -0.8, -0.5, 0.0]]))


def test_the_adaptive_coefficient_by_hand():
    """Target 1, delta 0.25: up while the entropy is at most 1; above it, down, and no bonus in the next step."""
    method = AdaptiveEntropy(target=1.0, delta=0.25, start=0.25, maximum=1.0)
    seen = []
    for entropy in (0.5, 1.0, 2.0, math.nan, 0.5, 3.0, 3.0, 3.0, 3.0, 3.0):
        metrics = method.end_rl_step(StepSummary(entropy, {}))
        seen.append((metrics["adaptive/coefficient"], method.coefficient, method.active))
    assert seen == [
        (0.25, 0.5, True),
        (0.5, 0.75, True),
        (0.75, 0.5, False),
        (0.0, 0.5, False),
        (0.0, 0.75, True),
        (0.75, 0.5, False),
        (0.0, 0.25, False),
        (0.0, 0.0, False),
        (0.0, 0.0, False),
        (0.0, 0.0, False),
    ]


def test_the_adaptive_coefficient_stays_at_its_maximum():
    """The authors' 0.005 by default; from there it falls as from any other."""
    method = AdaptiveEntropy(target=1.0, delta=0.002)
    used = [method.end_rl_step(StepSummary(0.5, {}))["adaptive/coefficient"] for _ in range(5)]
    assert used == pytest.approx([0.0, 0.002, 0.004, 0.005, 0.005])
    method.end_rl_step(StepSummary(2.0, {}))
    assert method.coefficient == pytest.approx(0.003)


def test_the_adaptive_bonus_is_epos_bonus_without_its_band(tmp_path):
    """lambda 0.5 and no smoothing against a coefficient of 0.5."""
    settings = {"target": 9.0, "start": 0.5, "maximum": 0.5}
    adaptive = {"method_kwargs": {"adaptive": settings}, "entropy_method": ["adaptive"]}
    epo = catch_step(trainer_of(tmp_path, epo_lambda=0.5, smoothing_alpha=0.0))[1]
    assert difference(catch_step(trainer_of(tmp_path, **adaptive))[1], epo) < 1e-6 < 1e-3 < largest(epo)
