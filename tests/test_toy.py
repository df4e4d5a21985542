"""TreasureHunt keeps the contract, and plays as its text says."""

import pytest

from epo_trl.envs import EnvError
from epo_trl.envs.testing import EnvContract
from epo_trl.envs.toy import ToySuite, TreasureHunt, build_hunt


class TestToySuite(EnvContract):
    expert_turns = 7

    def make_suite(self):
        return ToySuite()


def pairs(split):
    hunts = [build_hunt(task_id) for task_id in ToySuite().task_ids(split)]
    return {(hunt.wanted, box) for hunt in hunts for box, thing in hunt.contents.items() if thing == hunt.wanted}


def first_of_type(task_type):
    return next(task for task in ToySuite().task_ids("train") if build_hunt(task).task_type == task_type)


def expert_turns(task_id):
    env, expert = ToySuite().make_env(), ToySuite().make_expert()
    observation, info = env.reset(options={"task_id": task_id})
    for turn in range(1, 20):
        observation, reward, won, truncated, info = env.step(expert.act(observation, info)[1])
        if won or truncated:
            return turn, reward, won
    raise AssertionError("the expert did not finish")


def test_ood_asks_for_pairs_of_thing_and_box_that_train_and_iid_never_ask_for():
    assert len(pairs("ood")) > 1
    assert pairs("ood") & (pairs("train") | pairs("iid")) == set()


def test_the_expert_needs_two_turns_when_the_boxes_are_open_and_three_to_seven_when_not():
    turns = {"visible": set(), "hidden": set()}
    for split in ToySuite().splits:
        for task_id in ToySuite().task_ids(split):
            count, reward, won = expert_turns(task_id)
            assert won
            assert reward == 1.0
            turns[build_hunt(task_id).task_type].add(count)
    assert turns["visible"] == {2}
    assert min(turns["hidden"]) == 3
    assert max(turns["hidden"]) <= 7


def test_info_follows_a_hunt_turn_by_turn():
    env = TreasureHunt()
    _, info = env.reset(options={"task_id": first_of_type("hidden")})
    hunt = build_hunt(first_of_type("hidden"))
    box = next(box for box, thing in hunt.contents.items() if thing == hunt.wanted)
    assert info["visited"] == ()
    assert info["unvisited"] == tuple(hunt.contents)
    assert (info["holding"], info["here"]) == ("nothing", "the middle of the hall")
    assert info["actions_here"] == ()
    assert not any(action.startswith("take") for action in info["admissible_actions"])

    info = env.step(f"open {box}")[-1]
    assert info["visited"] == (box,)
    assert box not in info["unvisited"]
    assert info["here"] == box
    assert info["actions_here"] == (f"take {hunt.wanted} from {box}",)

    info = env.step(f"take {hunt.wanted} from {box}")[-1]
    assert info["holding"] == hunt.wanted
    assert info["won"] is False

    _, reward, terminated, truncated, info = env.step(f"put {hunt.wanted} into chest")
    assert (reward, terminated, truncated, info["won"]) == (1.0, True, False, True)
    assert (info["holding"], info["here"]) == ("nothing", "chest")


@pytest.mark.parametrize(
    "task_id", ["train", "train/200", "train/-1", "test/0", "train/x", "train/٣", "train/03", "", 3, None]
)
def test_an_unknown_task_id_is_named_with_the_ids_there_are(task_id):
    expected = "'train/0' to 'train/199', 'iid/0' to 'iid/39', 'ood/0' to 'ood/39'"
    with pytest.raises(EnvError, match=f"task_id: expected {expected}, got {task_id!r}"):
        ToySuite().make_env().reset(options={"task_id": task_id})


def test_a_part_of_the_tasks_to_demonstrate_is_spread_over_the_whole_list():
    suite = ToySuite()
    ids = list(dict.fromkeys(suite.task_ids("train")))
    few = suite.demonstration_tasks("train", 20, 4)
    assert [ids.index(task_id) * 4 // len(ids) for task_id in few] == [0, 1, 2, 3]
    assert few == ToySuite().demonstration_tasks("train", 20, 4)
    assert suite.demonstration_tasks("train", 20) == ids == suite.demonstration_tasks("train", 20, len(ids) + 1)
