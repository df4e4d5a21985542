"""Groups with the most variance: choices by hand, over ranks, and what is left out of the loss."""

from dataclasses import replace

import pytest
from method_batches import run_on_ranks
from run_kit import logged
from trainer_kit import GROUP, catch_step, difference, largest, make_config, make_episodes, make_trainer

from epo_trl.envs.toy import ToySuite
from epo_trl.methods import Comm, Group, Selection, build_methods
from epo_trl.methods.variance_filter import VarianceFilter
from epo_trl.trainers.collection import Collector
from epo_trl.types import Episode, StopReason, Turn

TRAIN, LEAVE_OUT = Selection.TRAIN, Selection.LEAVE_OUT


def group(*returns, unusable=()):
    return Group(returns, (False,) * len(returns), tuple(i not in unusable for i in range(len(returns))))


# Variances 1, 25, 0, 4, 1 and, without the member that carries no signal, 0.
GROUPS = [group(0.0, 2.0), group(0.0, 10.0), group(5.0, 5.0), group(4.0, 0.0), group(3.0, 1.0),
          group(9.0, 0.0, unusable=(0,))]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "chosen"),
    [
        ({"share": 0.8}, [1]),  # of 31: 25 is enough for 24.8
        ({}, [1, 3]),  # 29 for 27.9
        ({"share": 0.95}, [0, 1, 3]),  # 30 for 29.45; of equals the first
        ({"share": 1.0}, [0, 1, 3, 4]),
        ({"share": 1.0, "most": 2}, [1, 3]),
        ({"most": 1}, [1]),
        ({"share": 1.0, "most": 9}, [0, 1, 3, 4]),
    ],
    ids=str,
)
def test_choices_by_hand(settings, chosen):
    made = VarianceFilter(**settings).select(GROUPS)
    assert made == [TRAIN if i in chosen else LEAVE_OUT for i in range(len(GROUPS))]


def test_without_variance_no_group_is_chosen():
    """Also where returns differ by the rounding of a sum."""
    assert VarianceFilter().select([group(5.0, 5.0), group(0.1 + 0.2, 0.3)]) == [LEAVE_OUT] * 2
    assert VarianceFilter().select([group(1.0, 2.0, unusable=(0, 1))]) == [LEAVE_OUT]


# -------------------------------------------------------------------------------------------------------- collection


def collected(folder, ranks, tasks, play, policy_method):
    methods = build_methods(make_config(folder, policy_method=policy_method), critic=False)
    args = make_config(folder, max_resamples=50)
    collector = Collector(ToySuite(), methods, ranks, [f"train/{i}" for i in range(20)], args, GROUP, (0,))
    return collector.collect(tasks, play, 0)


def by_task(first=0):
    """Returns a player whose returns spread by the number of the task; that of an even task is the same for all."""

    def play(tasks, **kwargs):
        values = [int(task.split("/")[1]) * (int(task.split("/")[1]) % 2) * ((first + i) % 2)
                  for i, (task, _) in enumerate(tasks)]  # fmt: skip
        return [Episode(task, "", "", (Turn((1,), (2,), "", "", "", True, float(value)),), StopReason.TURN_LIMIT)
                for (task, _), value in zip(tasks, values, strict=True)]  # fmt: skip

    return play


def test_two_ranks_leave_out_the_same_groups_also_one_that_they_share(tmp_path):
    """Groups of 4 over two ranks of 6: variances 0.25, 2.25 and 6.25, of which two hold 0.9."""
    tasks = ["train/1"] * 4 + ["train/3"] * 4 + ["train/5"] * 4
    whole, metrics = collected(tmp_path, Comm(), tasks, by_task(), "variance-filter")
    assert [e.left_out for e in whole.episodes] == [True] * 4 + [False] * 8
    assert metrics["rollout/left_out_groups"] == 1 and metrics["rollout/unwanted_groups"] == 0
    assert not any(e.left_out for e in whole.played) and metrics["env/return"] == pytest.approx(1.5)
    assert [e.is_usable for e in whole.episodes] == [False] * 4 + [True] * 8

    def run(rank, ranks):
        rows = slice(6 * rank, 6 * rank + 6)
        return collected(tmp_path, ranks, tasks[rows], by_task(6 * rank), "variance-filter")

    (one, of_one), (other, of_other) = run_on_ranks(run)
    assert of_one["rollout/left_out_groups"] == of_other["rollout/left_out_groups"] == 1
    assert [*one.episodes, *other.episodes] == whole.episodes


def test_groups_are_replaced_first(tmp_path):
    methods = ["method_examples:KeepUnequal", "variance-filter"]
    batch, metrics = collected(tmp_path, Comm(), ["train/2"] * 4 + ["train/19"] * 4, by_task(), methods)
    assert metrics["rollout/resampled_groups"] >= 1 and metrics["rollout/unwanted_groups"] == 0
    numbers = [int(batch.tasks[first].split("/")[1]) for first in (0, GROUP)]
    assert numbers[0] % 2 and numbers[1] == 19
    left_out = VarianceFilter().select([group(0.0, float(number)) for number in numbers]).count(LEAVE_OUT)
    assert metrics["rollout/left_out_groups"] == left_out


# ----------------------------------------------------------------------------------------------------------- training

HALF = {"policy_method": ["variance-filter"], "method_kwargs": {"variance-filter": {"share": 0.5}}}


@pytest.mark.parametrize("credit", ["grpo", "gigpo", "reinforce++"])
def test_a_group_that_is_left_out_is_in_no_term_and_no_mean(tmp_path, credit):
    """As if all of its episodes had been aborted: credit, EPO's terms, and their metrics."""
    aborted = [replace(e, stop=StopReason.ABORTED) if i >= GROUP else e for i, e in enumerate(make_episodes())]
    runs = []
    for changes, episodes in ((HALF, make_episodes()), ({"max_aborted_share": 1.0}, aborted)):
        trainer = make_trainer(tmp_path, credit=credit, epo_lambda=0.5, max_steps=1, **changes)
        trainer.play = lambda tasks, episodes=episodes, **kwargs: episodes
        runs.append((catch_step(trainer, history=[1.0]), logged(trainer, "epo/entropy_loss")))
    ((loss, one), metric), ((again, other), same) = runs
    assert loss == again and difference(one, other) == 0.0 < largest(one) and metric == same


@pytest.mark.parametrize("loss", ["dapo", "cispo", "vespo", "grpo", "sapo", "dr_grpo", "luspo"])
def test_the_policy_loss_of_half_of_the_groups_is_that_of_a_batch_without_the_others(tmp_path, loss):
    """One group of two, so a mean that also counted the rows of the other would be half as large."""
    steps = []
    for changes in (HALF, {}):
        episodes = make_episodes()
        rows = len(episodes) if changes else GROUP
        trainer = make_trainer(
            tmp_path, epo_lambda=0.0, epsilon_high=5.0, loss_type=loss, per_device_train_batch_size=rows, **changes
        )
        trainer.play = lambda tasks, episodes=episodes[:rows], **kwargs: episodes
        steps.append(catch_step(trainer)[1])
    assert difference(*steps) < 1e-5 * largest(steps[1])


def test_a_batch_without_variance_trains_on_nothing_and_a_warning_says_so(tmp_path):
    trainer = make_trainer(tmp_path, epo_lambda=0.5, **HALF)
    equal = [replace(e, turns=tuple(replace(t, reward=0.0) for t in e.turns)) for e in make_episodes()]
    trainer.play = lambda tasks, **kwargs: equal
    with pytest.warns(UserWarning, match="No token of RL step 0 is trained on.*rollout/left_out_groups"):
        loss, gradients = catch_step(trainer)
    assert loss.item() == 0 and largest(gradients) == 0
