"""A run that explodes or collapses says so, once; what it knows goes through a checkpoint."""

import json
import math
import warnings
from dataclasses import replace

import pytest
from run_kit import logged
from trainer_kit import make_episodes, make_trainer

from epo_trl.methods import Comm
from epo_trl.trainers.monitoring.run_health import RunHealth, watched_entropy

GOOD = {"entropy": 1.0, "invalid": 0.05, "success": 0.6}
RANDOM = {"entropy": 3.0, "invalid": 0.05, "success": 0.6}
INVALID = {"entropy": 1.0, "invalid": 0.35, "success": 0.6}
STUCK = {"entropy": 0.1, "invalid": 0.05, "success": 0.2}


def play(health, step):
    health.add_rollout({"env/invalid_actions": step["invalid"], "env/success_rate": step["success"]})


def walk(health, steps, first=0, *, played=0):
    """Returns the flags of each RL step, and `(rl_step, text)` of each warning; `played` rollouts are known already."""
    flags, told = [], []
    for rl_step, step in enumerate(steps, first):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if rl_step - first >= played:
                play(health, step)
            metrics = health.end_rl_step({"entropy/all_tokens": step["entropy"]}, rl_step)
        assert list(metrics) == ["run/exploded", "run/collapsed"]
        flags.append(tuple(metrics.values()))
        told += [(rl_step, str(one.message)) for one in caught]
    return flags, told


def test_an_explosion_is_told_once_with_its_numbers():
    flags, told = walk(RunHealth(Comm()), [GOOD] * 5 + [RANDOM] * 20)
    assert flags == [(0.0, 0.0)] * 14 + [(1.0, 0.0)] * 11
    (rl_step, text), *others = told
    assert (rl_step, others) == (14, [])
    assert "(RL step 14): over the last 10 RL steps entropy is above 2 times its start (1 nats). Some" in text
    assert "epo_lambda" in text and "learning_rate" in text


def test_invalid_turns_are_told_as_what_they_are():
    _, told = walk(RunHealth(Comm()), [GOOD] * 5 + [INVALID] * 20)
    # After n such steps the mean is 0.05 + 0.03 n, 20 points above the start at n = 7.
    assert [rl_step for rl_step, _ in told] == [11]
    text = told[0][1]
    assert "(RL step 11): over the last 10 RL steps 26% of the turns are invalid, 5% at the start" in text
    assert "and entropy has not doubled, so the policy has learned malformed answers. " in text
    assert "invalid_action: skip" in text and "epo_lambda" not in text


def test_a_collapse_is_told_once_with_its_numbers():
    flags, told = walk(RunHealth(Comm()), [GOOD] * 10 + [STUCK] * 20)
    # After n such steps the running means are entropy 1 - 0.09 n, success 0.6 - 0.04 n.
    assert flags == [(0.0, 0.0)] * 17 + [(0.0, 1.0)] * 13
    assert [rl_step for rl_step, _ in told] == [17]
    assert "entropy was 0.28 nats, below 0.3 times its start (1), and success 28%, 60% at best" in told[0][1]


@pytest.mark.parametrize(("zeros", "told_at"), [(8, [12]), (9, [12, 25])])
def test_it_is_told_again_only_after_ten_calm_steps(zeros, told_at):
    """The mean comes to 0.2 in step 12, is 0.19 in step 13 and 0.2 again in 14; then it is low for some steps."""
    invalid = [0.0] * 3 + [0.2] * 10 + [0.1, 0.3] + [0.0] * zeros + [1.0, 1.0]
    flags, told = walk(RunHealth(Comm()), [{**GOOD, "invalid": share} for share in invalid])
    assert [step for step, (exploded, _) in enumerate(flags) if exploded] == [12, 14, zeros + 16]
    assert [rl_step for rl_step, _ in told] == told_at


def test_another_process_counts_and_says_nothing():
    steps = [GOOD] * 10 + [STUCK] * 10 + [RANDOM] * 12
    (flags, told), (others, silent) = (walk(RunHealth(Comm(index=i)), steps) for i in range(2))
    assert flags == others and len(told) == 2 and silent == []


@pytest.mark.parametrize("at", range(0, 40, 7))
def test_a_resumed_watch_says_the_same_as_one_that_was_never_stopped(at):
    """Written as JSON in the middle of a batch: after its rollout, before its end."""
    steps = [GOOD] * 10 + [STUCK] * 10 + [RANDOM] * 14 + [INVALID] * 6
    flags, told = walk(RunHealth(Comm()), steps)
    assert len(told) == 2 and flags.count((0.0, 0.0)) > 10
    before, after = RunHealth(Comm()), RunHealth(Comm())
    first = walk(before, steps[:at])
    play(before, steps[at])
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    second = walk(after, steps[at:], at, played=1)
    assert first[0] + second[0] == flags and first[1] + second[1] == told


def test_a_collapse_is_seen_in_the_tokens_with_a_choice_where_they_are_known():
    every = {"entropy/all_tokens": 0.5, "entropy/decision_tokens": 0.9}
    assert watched_entropy(every) == 0.5
    assert watched_entropy({**every, "ref-nucleus/choice_share": 0.1, "ref-nucleus/choice_entropy": 1.5}) == 1.5
    # No token with a choice is no entropy of 0, and none of other tokens either.
    assert math.isnan(watched_entropy({**every, "ref-nucleus/choice_share": 0.0}))
    assert math.isnan(watched_entropy({}))


# ------------------------------------------------------------------------------------------------------- in a run


def spoiled_from(rl_step, trainer):
    """Lets the trainer play episodes made by hand, all of whose turns are invalid from an RL step on."""

    def play(tasks, **kwargs):
        bad = trainer.rl_step >= rl_step
        return [
            replace(episode, turns=tuple(replace(turn, is_valid=not bad) for turn in episode.turns))
            for episode in make_episodes()
        ]

    trainer.play = play


def run(folder, *, max_steps=24, checkpoint=None, **changes):
    """Returns a trainer after two optimizer steps an RL step, and what it told of health."""
    trainer = make_trainer(
        folder, max_steps=max_steps, per_device_train_batch_size=4, steps_per_generation=2, save_strategy="steps",
        save_steps=17, trust_checkpoint=True, **changes,
    )  # fmt: skip
    spoiled_from(8, trainer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train(resume_from_checkpoint=checkpoint)
    return trainer, [str(one.message) for one in caught if "The run " in str(one.message)]


def test_a_run_says_when_it_explodes_also_if_it_was_interrupted_in_the_middle_of_a_batch(tmp_path):
    straight, told = run(tmp_path / "straight")
    # RL steps 8 and 9 are all invalid: 20 % of the ten until then.
    assert logged(straight, "run/exploded") == [0.0] * 9 + [1.0] * 3
    assert logged(straight, "run/collapsed") == [0.0] * 12
    assert len(told) == 1 and "The run has exploded (RL step 9): over the last 10 RL steps 20% of the turns" in told[0]
    health = straight.health.state_dict()
    assert health["explosion"]["entropy"]["latest"] == logged(straight, "entropy/all_tokens")[-10:]
    assert health["collapse"]["entropy"]["first"] == logged(straight, "entropy/all_tokens")[:3]
    assert health["explosion"]["invalid"]["latest"] == logged(straight, "env/invalid_actions")[-10:]
    assert health["collapse"]["success"]["latest"] == logged(straight, "env/success_rate")[-10:]

    resumed, told_again = run(tmp_path / "resumed", checkpoint=str(tmp_path / "straight" / "checkpoint-17"))
    assert told_again == told
    for name in ("run/exploded", "run/collapsed", "entropy/all_tokens", "entropy/first_third", "entropy/last_third"):
        assert logged(resumed, name) == logged(straight, name), name
    assert resumed.health.state_dict() == health


def test_the_watched_entropy_is_that_of_the_reference_where_there_is_one(tmp_path):
    trainer, _ = run(tmp_path, max_steps=6, entropy_method=["ref-nucleus"])
    assert trainer.health.state_dict()["collapse"]["entropy"]["latest"] == logged(trainer, "ref-nucleus/choice_entropy")
