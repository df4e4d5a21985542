"""TRL's losses whose scale is another where a sequence is an episode of several turns, and what is said of them."""

import warnings
from dataclasses import replace

import pytest
import torch
from fused_heads import make_mixture
from trainer_kit import (
    GROUP,
    catch_step,
    difference,
    largest,
    make_config,
    make_episodes,
    make_trainer,
    saved,
    with_episodes,
)

from epo_trl.types import StopReason

TOKENS, EPISODES = 39, 7  # of the episodes made by hand, without the aborted one


def gradients(folder, *, then=lambda trainer: None, episodes=None, **changes):
    """Returns the gradients of one update, by default on the episodes made by hand, without entropy terms."""
    trainer = with_episodes(make_trainer(folder, epo_lambda=0.0, **changes), episodes)
    then(trainer)
    found = catch_step(trainer)[1]
    assert largest(found) > 1e-3
    return found


def assert_times(factor, one, other):
    """Checks that one set of gradients is so many times the other."""
    assert difference({name: value * factor for name, value in other.items()}, one) < 1e-5 * largest(one)


def test_luspo_is_as_many_times_dapo_as_an_episode_has_tokens(tmp_path):
    """39 tokens in 7 episodes: 5.57 each."""
    luspo, dapo = (gradients(tmp_path, loss_type=name) for name in ("luspo", "dapo"))
    assert_times(TOKENS / EPISODES, luspo, dapo)


@pytest.mark.parametrize("rows", [8, 2], ids=["one micro-batch", "four micro-batches"])
@pytest.mark.parametrize("loss", ["grpo", "sapo", "dr_grpo", "luspo", "dapo"])
def test_aborted_episodes_do_not_shrink_the_policy_loss(tmp_path, loss, rows):
    """A group alone and beside a group of aborted episodes."""
    group = make_episodes()[:GROUP]
    aborted = [replace(episode, stop=StopReason.ABORTED) for episode in group]
    alone = gradients(tmp_path, loss_type=loss, episodes=group, per_device_train_batch_size=GROUP)
    beside = gradients(
        tmp_path, loss_type=loss, episodes=[*group, *aborted], per_device_train_batch_size=rows,
        gradient_accumulation_steps=2 * GROUP // rows,
    )  # fmt: skip
    assert_times(1.0, beside, alone)


@pytest.mark.parametrize("loss", ["grpo", "sapo", "dr_grpo", "luspo", "dapo"])
def test_aborted_episodes_change_neither_the_kl_nor_trls_entropy_bonus_nor_the_router_loss(tmp_path, loss):
    """KL is a part of the policy loss; the other two are means over tokens, among which are none of aborted episodes.

    The rewards are 0, so that there are no other terms.
    """
    group = [
        replace(episode, turns=tuple(replace(turn, reward=0.0, env_reward=0.0) for turn in episode.turns))
        for episode in make_episodes()[:GROUP]
    ]
    aborted = [replace(episode, stop=StopReason.ABORTED) for episode in group]

    @torch.no_grad()
    def shift_reference(trainer):
        for parameter in trainer.ref_model.parameters():
            parameter.mul_(0.9)

    for terms in ({"beta": 0.1}, {"entropy_coef": 0.1}, {"router_aux_loss_coef": 0.1}):
        weights = {"router_aux_loss_coef": 0.0, **terms}
        alone, beside = (
            gradients(
                tmp_path, loss_type=loss, episodes=episodes, per_device_train_batch_size=len(episodes),
                model=saved(make_mixture(), tmp_path / "model"),
                then=shift_reference if "beta" in terms else lambda trainer: None, **weights,
            )
            for episodes in (group, group + aborted)
        )  # fmt: skip
        assert_times(1.0, beside, alone)


def test_cispo_with_a_cap_below_1_is_that_part_of_itself(tmp_path):
    """All ratios are 1: capped at 5 they stay, and the gradient is that of any clipped loss; at 0.2 a fifth is left."""
    whole = gradients(tmp_path, loss_type="cispo", epsilon_high=5.0)
    dapo = gradients(tmp_path, loss_type="dapo")
    assert_times(1.0, whole, dapo)
    part = gradients(
        tmp_path, loss_type="cispo", epsilon_high=5.0, then=lambda trainer: setattr(trainer, "epsilon_high", 0.2)
    )
    assert_times(0.2, part, whole)


@pytest.mark.parametrize(("loss", "same"), [("vespo", "dapo"), ("sapo", "grpo")])
def test_in_the_first_update_on_a_batch_every_ratio_is_1_and_weighs_1(tmp_path, loss, same):
    one, other = (gradients(tmp_path, loss_type=name) for name in (loss, same))
    assert_times(1.0, one, other)


SCALES = {
    "dr_grpo": "longest response of one turn",
    "luspo": "without a divisor",
    "vespo": "product of its tok",
}


@pytest.mark.parametrize(
    ("changes", "warns"),
    [
        ({"loss_type": "dapo"}, False),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, False),
        ({"loss_type": "dr_grpo"}, True),
        ({"loss_type": "luspo"}, True),
        ({"loss_type": "vespo"}, False),
        ({"loss_type": "vespo", "num_iterations": 2}, True),
        ({"loss_type": "vespo", "steps_per_generation": 2, "per_device_train_batch_size": 4}, True),
        (  # one update for both passes over a batch
            {"loss_type": "vespo", "num_iterations": 2, "steps_per_generation": 1, "gradient_accumulation_steps": 2},
            False,
        ),
    ],
    ids=str,
)
def test_what_is_said_of_a_loss(tmp_path, changes, warns):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_config(tmp_path, **changes)
    texts, loss = [str(one.message) for one in caught], changes["loss_type"]
    assert len(texts) == warns and all(f"loss_type: got {loss!r}" in text and SCALES[loss] in text for text in texts)
