"""Corridor keeps the contract, and its optimal values are those of value iteration."""

from pathlib import Path

import pytest
from corridor import DOORS, CorridorSuite, door_on, optimal_value

from epo_trl.envs.testing import EnvContract


class TestCorridor(EnvContract):
    def make_suite(self):
        return CorridorSuite(4)


def test_one_door_leads_on_and_the_other_to_the_start():
    env = CorridorSuite(3).make_env()
    assert env.reset(options={"task_id": "train/2"})[0] == "You are in room 3."
    other = DOORS[1 - DOORS.index(door_on(3))]
    assert env.step(other)[0] == "You are in room 1."
    assert env.step(door_on(1))[0] == "You are in room 2."
    assert env.step("jump")[0] == "You are in room 2."
    observation, reward, terminated, truncated, info = [env.step(door_on(room)) for room in (2, 3)][-1]
    assert (observation, reward, terminated, truncated, info["won"]) == ("You are out.", 1.0, True, False, True)


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.5])
def test_the_optimal_values_are_those_of_value_iteration(gamma):
    rooms, reward = 5, 10.0
    values = [0.0] * (rooms + 2)  # 0 is unused, the last is outside
    for _ in range(100):
        for room in range(1, rooms + 1):
            on = reward if room == rooms else gamma * values[room + 1]
            values[room] = max(on, gamma * values[1])
    expected = [optimal_value(room, rooms, gamma=gamma, reward=reward) for room in range(1, rooms + 1)]
    assert values[1:-1] == pytest.approx(expected)


@pytest.mark.slow
def test_a_policy_learns_the_way_out_and_its_critic_the_optimal_values(tmp_path, monkeypatch):
    """The settings of benchmarks/bench_credit.py on a shorter corridor.

    A run takes another course on every processor. With 40 steps, seeds 0 to 9, each with native rounding, with that of
    an older processor, and with 2 threads and weights changed by 1e-6, took 8.7 turns or more at first and 2.8 or fewer
    at the end (the best player takes 2.5), and values were off by 0.39 at most in 29 of the 30 runs, by 0.68 in one. A
    critic that knew the mean alone is off by 1.4, one that learned nothing by 10.
    """
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    import bench_credit

    sizes = {"rooms": 4, "move_limit": 12, "steps": 35, "critic_warmup_steps": 5 * bench_credit.EPOCHS}
    trainer = bench_credit.make_trainer("turn", 0, str(tmp_path), **sizes)
    trainer.train()
    turns = [line["env/turns"] for line in trainer.state.log_history if "env/turns" in line]
    assert sum(turns[:5]) / 5 > 6 and sum(turns[-5:]) / 5 < 4
    values, optimal = bench_credit.room_values(trainer)
    assert max(optimal) - min(optimal) > 2.5
    assert values == pytest.approx(optimal, abs=1.0)
