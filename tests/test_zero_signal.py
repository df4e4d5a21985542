"""A run that learns nothing says so in words, once per stretch."""

import math
import random
import warnings
from dataclasses import replace

import pytest
import torch
from trainer_kit import (
    catch_step,
    collected,
    largest,
    make_episode,
    make_episodes,
    make_ppo,
    make_trainer,
    results_of,
    toy_tokenizer,
    with_episodes,
)

from epo_trl.trainers.step import equal_within_groups
from epo_trl.types import StopReason

NO = math.nan


@pytest.mark.parametrize(
    ("rewards", "group", "equal"),
    [
        ([1, 1, 0, 0], 2, True),
        ([1, 1, 0, 0], 4, False),
        ([1, 1, 0, 0.1], 2, False),
        ([1, NO, 0, 0], 2, True),  # one member was aborted
        ([1, NO, 0, 0], 4, False),
        ([NO, NO, 0, 0], 2, True),
        ([NO, NO, NO, NO], 4, True),
        ([-0.3, -0.1 - 0.1 - 0.1, -0.3, -0.3], 4, True),  # the same sum, rounded otherwise
    ],
)
def test_groups_with_one_reward_have_nothing_to_compare(rewards, group, equal):
    assert bool(equal_within_groups(torch.tensor(rewards).float().unsqueeze(1), group).all()) is equal


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_the_rounding_of_equal_rewards_is_no_advantage(tmp_path, aggregation):
    """The float32 mean of six times -0.3 or 9.9 is another number, and TRL divides the difference by 1e-4."""

    def trainer_of(rewards):
        episodes = [make_episode([(5, 3)], reward, random.Random(i)) for i, reward in enumerate(rewards)]
        trainer = make_trainer(
            tmp_path, epo_lambda=0.0, num_generations=6, per_device_train_batch_size=12,
            multi_objective_aggregation=aggregation,
        )  # fmt: skip
        return with_episodes(trainer, episodes)

    equal = [-0.3] * 6 + [9.9] * 6
    assert largest(catch_step(trainer_of(equal))[1]) == 0.0
    trainer = trainer_of([10.0, *equal[1:]])
    outputs = results_of(trainer, "_generate_and_score_completions")
    assert largest(catch_step(trainer)[1]) > 1e-3
    advantages = outputs[0]["advantages"]
    assert advantages[:6].any() and not advantages[6:].any()  # the rewards of the second group are equal


@pytest.mark.parametrize(
    ("make", "rewards", "warns"),
    [
        (make_trainer, [2.0] * 8, True),
        (make_trainer, [2.0] * 4 + [3.0] * 4, True),
        (make_trainer, [2.0] * 7 + [3.0], False),
        (make_ppo, [2.0] * 8, True),
        (make_ppo, [2.0] * 4 + [3.0] * 4, False),  # the critic compares an episode with all others
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_trainer_warns_in_the_third_step_without_differences_and_not_again(tmp_path, make, rewards, warns):
    trainer = make(tmp_path, **({"bootstrap_truncated": False} if make is make_ppo else {}))
    found = warnings_of(trainer, [with_rewards([*rewards[:5], 99.0, *rewards[6:]])] * 5)  # the sixth is aborted
    assert [step for step, _ in found] == [2] * warns
    assert all("(up to 2) the episodes that are compared got equal rewards, 43% of" in text for _, text in found)


def with_rewards(rewards):
    """Returns the episodes made by hand with these total rewards, paid in the last turn."""
    return [
        replace(e, turns=tuple(replace(turn, reward=reward * (turn is e.turns[-1])) for turn in e.turns))
        for e, reward in zip(make_episodes(), rewards, strict=True)
    ]


def warnings_of(trainer, batches):
    """Returns RL step and text of each warning of equal rewards while the trainer collects these batches."""
    found = []
    for step, episodes in enumerate(batches):
        batch, caught = step_on(trainer, step, episodes)
        found += [(step, text) for text in caught if "got equal rewards" in text]
        if found:
            assert not batch["advantages"].any(), "said, although the policy is moved by more than entropy"
    return found


def step_on(trainer, rl_step, episodes):
    """Returns TRL's batch of these episodes, and the texts of all warnings."""
    trainer.rl_step = rl_step
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batch = collected(with_episodes(trainer, episodes))
    return batch, [str(one.message) for one in caught]


@pytest.mark.parametrize(("gamma", "warns"), [(0.9, False), (1.0, True)])
def test_with_a_critic_episodes_of_equal_rewards_may_differ_in_when_they_were_paid(tmp_path, gamma, warns):
    """All win 10, after one to four turns: with a discount the sooner the better."""
    trainer = make_ppo(tmp_path, gamma=gamma, bootstrap_truncated=False)
    assert bool(warnings_of(trainer, [with_rewards([10.0] * 8)] * 4)) is warns


@pytest.mark.parametrize(("step_weight", "warns"), [(1.0, False), (0.0, True)])
def test_episodes_of_equal_rewards_may_differ_in_their_turns(tmp_path, step_weight, warns):
    """All win 10, after one turn or two from the same start: GiGPO prefers the shorter way."""
    trainer = make_trainer(tmp_path, credit="gigpo", method_kwargs={"gigpo": {"step_weight": step_weight}})
    won = [make_episode([(5, 2)] * (1 + i % 2), 10.0, random.Random(i), stop=StopReason.WON) for i in range(8)]
    assert bool(warnings_of(trainer, [won] * 4)) is warns


def test_a_batch_whose_rows_are_all_left_out_is_told_of(tmp_path):
    """No episode ends with the end-of-turn token; in the second and third batch one does."""
    trainer = make_trainer(tmp_path, mask_truncated_completions=True)
    eos = toy_tokenizer().eos_token_id
    found = []
    for step in range(5):
        episodes = make_episodes()
        if step in (1, 2):
            last = episodes[1].turns[-1]
            episodes[1] = replace(episodes[1], turns=(replace(last, response_ids=(*last.response_ids, eos)),))
        found += [text for text in step_on(trainer, step, episodes)[1] if "is trained on" in text]
    assert [text.split(":")[0] for text in found] == [f"No token of RL step {k} is trained on" for k in (0, 3)]
    assert all("raise max_completion_length" in text for text in found)
