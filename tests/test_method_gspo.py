"""GSPO per turn: ratios worked out by hand, TRL's own as the reference, and no change where every ratio is 1."""

import math

import pytest
import torch
from trainer_kit import difference, make_episodes, make_trainer

from epo_trl.methods.gspo import TurnGSPO
from epo_trl.types import Episode, StopReason, Turn


def by_hand():
    """Returns log-probabilities, new and old, turns and mask of two turns, a prompt between them, and padding."""
    logps = torch.tensor([[-1.0, -2.0, 0.0, -1.0, 0.0], [-3.0, 0.0, 0.0, 0.0, 0.0]])
    old = torch.tensor([[-1.2, -1.6, 0.0, -1.5, 0.0], [-2.0, 0.0, 0.0, 0.0, 0.0]])
    turns = torch.tensor([[0, 0, 1, 1, -1], [0, -1, -1, -1, -1]])
    mask = torch.tensor([[1, 1, 0, 1, 0], [1, 0, 0, 0, 0]])
    return logps, old, turns, mask


def test_ratios_by_hand():
    """Turn 0: log ratios 0.2 and -0.4, mean -0.1; turn 1: 0.5; the other episode: -1."""
    logps, old, turns, mask = by_hand()
    log_ratio = (TurnGSPO().ratio(logps, old, turns, mask) - old) * mask
    torch.testing.assert_close(log_ratio, torch.tensor([[-0.1, -0.1, 0, 0.5, 0], [-1.0, 0, 0, 0, 0]]))


def test_the_gradient_is_the_turns_ratio_times_each_tokens_own_advantage():
    logps, old, turns, mask = by_hand()
    logps.requires_grad_()
    advantages = torch.tensor([[1.0, 2.0, 0, -1.0, 0], [3.0, 0, 0, 0, 0]])
    ratio = (TurnGSPO().ratio(logps, old, turns, mask) - old).exp()
    (ratio * advantages * mask).sum().backward()
    s, t, u = math.exp(-0.1), math.exp(0.5), math.exp(-1)
    torch.testing.assert_close(logps.grad, torch.tensor([[s, 2 * s, 0, -t, 0], [3 * u, 0, 0, 0, 0]]))


def weights(folder, updates=2, episodes=None, **changes):
    """Returns the weights after some updates on each batch of episodes made by hand."""
    trainer = make_trainer(
        folder,
        epo_lambda=0.0,
        num_iterations=updates,
        max_steps=2 * updates,
        optim="sgd",
        learning_rate=0.05,
        **changes,
    )
    trainer.play = episodes or (lambda tasks, **kwargs: make_episodes())
    trainer.train()
    return dict(trainer.model.state_dict())


def one_turn(tasks, **kwargs):
    """Returns an episode of one turn for each task."""
    values = torch.rand(len(tasks), generator=torch.Generator().manual_seed(0)).tolist()
    return [
        Episode(task, "", "", (Turn((9, 10, 11), (12, 13, 14 + i), "", "", "", True, value),), StopReason.LOST)
        for i, ((task, _), value) in enumerate(zip(tasks, values, strict=True))
    ]


def test_where_an_episode_is_one_turn_the_ratio_is_trls_per_sequence(tmp_path):
    """Several updates on a batch, so that ratios differ from 1."""
    per_turn, by_trl, per_token = (
        weights(tmp_path, 3, one_turn, **changes)
        for changes in ({"policy_method": "gspo"}, {"importance_sampling_level": "sequence"}, {})
    )
    assert difference(per_turn, by_trl) < 1e-5 < 1e-3 < difference(per_turn, per_token)


def test_with_one_update_on_each_batch_nothing_changes_and_a_warning_says_so(tmp_path):
    plain = weights(tmp_path, 1)
    with pytest.warns(UserWarning, match="'gspo' with one update per batch"):
        assert difference(weights(tmp_path, 1, policy_method="gspo"), plain) == 0.0
