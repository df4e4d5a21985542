"""What is logged about groups: by hand, over ranks, and in a run."""

import pytest
from run_kit import logged
from trainer_kit import make_ppo, make_trainer

from epo_trl.methods import Comm
from epo_trl.trainers.collection import group_metrics
from epo_trl.types import Episode, StopReason, Turn


def episode(actions, reward, won=False, stop=StopReason.TURN_LIMIT):
    turns = tuple(Turn((1,), (2,), "", "", action, True, reward * (k == 0)) for k, action in enumerate(actions))
    return Episode("train/0", "", "", turns, stop, won=won)


ABORTED = episode("z", 99.0, stop=StopReason.ABORTED)
MIXED = [episode("ab", 10.0, won=True), episode("ac", 0.0), episode("ab", 5.0), ABORTED]
EQUAL = [episode("ab", 1.0), episode("ba", 1.0), episode("cb", 1.0), episode("db", 3.0)]  # none has won
ALONE = [episode("a", 1.0), ABORTED, ABORTED, ABORTED]
WANT = {
    "env/group_return_std": (5.0 + 1.0) / 2,
    "env/group_equal": 0.5,
    "env/group_first_actions": (1 + 4) / 2,
    "env/group_actions": (3 + 4) / 2,
}


def test_by_hand():
    """Members without a signal do not count, nor does a group in which one is left."""
    assert group_metrics(MIXED + EQUAL + ALONE, 4, Comm()) == pytest.approx(WANT)
    assert group_metrics(ALONE, 4, Comm()) == group_metrics(EQUAL, 1, Comm()) == {}


def test_a_group_that_lies_on_two_ranks_is_one():
    here, there, gathered = (MIXED + EQUAL)[:6], EQUAL[2:], []
    group_metrics(there, 4, Comm(gather=lambda seen: gathered.extend(seen) or seen))
    assert group_metrics(here, 4, Comm(gather=lambda seen: seen + gathered, count=2)) == pytest.approx(WANT)


def test_a_run_with_groups_logs_them_and_one_without_does_not(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=2)
    trainer.train()
    assert all(len(logged(trainer, name)) == 2 for name in WANT)
    assert all(1 <= count <= 4 for count in logged(trainer, "env/group_first_actions"))
    ppo = make_ppo(tmp_path / "ppo", max_steps=1)
    ppo.train()
    assert not any(logged(ppo, name) for name in WANT)
