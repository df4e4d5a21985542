"""The largest reward of a turn is one that a loss can be made of; what is larger overflows in float32."""

import math

import pytest
from ppo_kit import paid, step_on
from run_kit import logged
from trainer_kit import largest, make_ppo, make_trainer

from epo_trl.types import LARGEST_REWARD

TURNS = 50  # ALFWorld's
LIMITS = {"max_turns": TURNS, "num_generations": 2}


def episodes_of(reward):
    """Returns two groups of two, of which one member gets the reward in each turn and the other its opposite."""
    return [paid(*[reward * sign] * n) for sign, n in ((1, TURNS), (-1, TURNS), (1, 1), (-1, 3))]


@pytest.mark.parametrize("make", [make_trainer, make_ppo])
def test_the_largest_reward_in_every_turn_is_learned_from(tmp_path, make):
    _, batch, gradients = step_on(tmp_path, episodes_of(LARGEST_REWARD), make=make, **LIMITS)
    assert math.isfinite(largest(gradients)) and largest(gradients) > 1e-3
    assert batch["advantages"].isfinite().all() and 0.5 < float(batch["advantages"].abs().max()) < 100


def test_grpo_divides_a_reward_whose_square_overflows_by_infinity(tmp_path):
    _, batch, gradients = step_on(tmp_path, episodes_of(1e20), make=make_trainer, **LIMITS)
    assert not batch["advantages"].any() and largest(gradients) == 0.0


def test_ppo_skips_the_update_on_a_reward_whose_square_overflows(tmp_path):
    trainer = make_ppo(tmp_path, per_device_train_batch_size=4, max_steps=1, **LIMITS)
    trainer.play = lambda tasks, **kwargs: episodes_of(1e20)
    trainer._final_states = lambda episodes: [[]] * 4
    trainer.train()
    assert logged(trainer, "guard/skipped_updates") == [1]
