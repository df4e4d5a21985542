"""The trap keeps the contract, its luck is as it says, and its optimal values are those of value iteration."""

import itertools

import pytest

from epo_trl.envs.testing import EnvContract
from epo_trl.envs.trap import COLOURS, HATCH, Trap, TrapSuite, door_on, go_through
from epo_trl.models.corpus import corpus
from epo_trl.rollout.demonstrations import few_shot_of, play_expert
from epo_trl.rollout.spec import FewShotArguments


class TestTrap(EnvContract):
    deterministic = False  # the luck of the hatch

    def make_suite(self):
        return TrapSuite()


def play(env, task_id, *doors):
    env.reset(options={"task_id": task_id})
    return [env.step(go_through(door)) for door in doors][-1]


def test_the_way_out_is_one_door_in_each_room_and_every_other_leads_to_the_first():
    way = [door_on(room, 4) for room in (1, 2, 3)]
    assert len(set(way)) == 3
    for doors in itertools.product(COLOURS[:4], repeat=3):
        observation, reward, over, truncated, info = play(TrapSuite().make_env(), "train/0", *doors)
        assert (info["won"], over, reward) == ((True, True, 1.0) if list(doors) == way else (False, False, 0.0))
        assert not truncated
    env = TrapSuite().make_env()
    assert play(env, "train/0", way[0], way[1])[0].startswith("You are in room 3.")
    assert env.step(go_through(HATCH))[0].startswith("You are in room 1.")  # it is a hatch in the first room only
    assert env.step("go through the low wall")[0].startswith("You are in room 1.")
    assert env.step(go_through(HATCH))[2]


def test_the_hatch_ends_the_game_and_wins_it_by_luck():
    suite = TrapSuite(hatch=0.35)
    env = suite.make_env()
    ends = [play(env, f"train/{i % 400}", HATCH) for i in range(4000)]
    assert all(over and not truncated for _, _, over, truncated, _ in ends)
    assert all(reward == float(info["won"]) for _, reward, _, _, info in ends)
    # standard error 0.75 points
    assert sum(info["won"] for *_, info in ends) / 4000 == pytest.approx(0.35, abs=0.03)
    # The episodes of a group start from the identical state, in environments of their own.
    group = [
        tuple(play(env, "train/0", HATCH)[4]["won"] for _ in range(20)) for env in (suite.make_env(), suite.make_env())
    ]
    assert group[0] != group[1]


def test_the_move_limit_truncates():
    env = TrapSuite(move_limit=3).make_env()
    wrong = next(colour for colour in COLOURS if colour != door_on(1, 4))
    assert [env.reset(options={"task_id": "iid/0"})] and [env.step(go_through(wrong))[2:4] for _ in range(3)] == [
        (False, False),
        (False, False),
        (False, True),
    ]


def test_the_habit_plays_what_the_warm_start_is_to_learn():
    suite = TrapSuite(liking=1.5)
    env = suite.make_env()
    taken = {room: [] for room in (1, 2, 3)}
    for seed, task_id in enumerate(suite.demonstration_tasks("train", 12, 600) * 5):
        observation, info = env.reset(options={"task_id": task_id})
        taken[seed % 3 + 1].append(suite.make_expert(seed).act(observation, info)[1])
    liked = 2.718281828**1.5
    for room, actions in taken.items():
        share = actions.count(go_through(HATCH)) / len(actions)
        assert share == pytest.approx(liked / (liked + 4) if room == 1 else 0.2, abs=0.06)  # standard error 1.6 points


def test_an_expert_episode_is_the_same_in_every_environment():
    suite = TrapSuite(liking=3.0)
    tasks = [(task_id, seed) for seed, task_id in enumerate(suite.demonstration_tasks("train", 12, 90))]
    first, second = (
        [play_expert(suite, env, *task, 12)[1] for task in tasks] for env in (suite.make_env(), suite.make_env())
    )
    assert first == second and 0 < sum(first) < len(first)
    assert few_shot_of(FewShotArguments(few_shot=9), suite) == few_shot_of(FewShotArguments(few_shot=9), suite)


def test_the_corpus_does_not_depend_on_how_many_environments_were_made():
    class Omens(Trap):
        def _see(self):
            omen = f" Omen {'abcdefghij'[self.luck.randrange(10)]}." if self.moves else ""
            return super()._see() + omen

    class OmenSuite(TrapSuite):
        def make_env(self):
            self._made += 1
            return Omens(3, 4, 0.35, 12, self._made)

        def demonstration_tasks(self, split, max_turns, count=None):
            return super().demonstration_tasks(split, max_turns, 3)

    suite = OmenSuite()
    first = corpus(suite, "corridor")
    assert len([text for text in first if "Omen" in text]) > 2 and corpus(suite, "corridor") == first
