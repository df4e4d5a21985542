"""Gold paths as demonstrations: they win, are kept on disk, and are filtered before they are played."""

import random

import pytest
from rollout_parts import byte_tokenizer, context_of

from epo_trl.envs.scienceworld import GoldExpert, ScienceWorldSuite
from epo_trl.envs.scienceworld.expert import DONE, with_teleports
from epo_trl.envs.scienceworld.gold import GoldPath
from epo_trl.envs.scienceworld.tasks import find_task
from epo_trl.models import build_tokenizer
from epo_trl.rollout import PromptTemplate
from epo_trl.rollout.demonstrations import expert_episodes

SHORT = ["find-non-living-thing", "lifespan-longest-lived"]  # task types with paths of 3 to 13 actions


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("gold"))


def make_suite(folder):
    sizes = {"n_iid": 4, "n_ood": 4}
    types = {"task_types": SHORT, "heldout_types": ["power-component"]}
    return ScienceWorldSuite(**types, **sizes, gold_folder=str(folder))


class NoJvm:
    def __init__(self, *args):
        raise AssertionError("a JVM was started")


@pytest.mark.games
def test_paths_are_generated_once_and_kept(folder, monkeypatch):
    suite = make_suite(folder)
    found = suite.demonstration_tasks("ood", max_turns=30)
    assert found == list(suite.task_ids("ood"))
    paths = {task_id: suite._gold.path(*find_task(task_id)) for task_id in found}
    assert all(0 < path.turns <= len(path.actions) for path in paths.values())
    actions = {action for path in paths.values() for action in path.actions}
    tokenizer = build_tokenizer(actions)
    assert {action for action in actions if tokenizer.decode(tokenizer(action)["input_ids"]) != action} == set()
    monkeypatch.setattr("epo_trl.envs.scienceworld.gold.Jvm", NoJvm)
    again = make_suite(folder)
    assert {task_id: again._gold.path(*find_task(task_id)) for task_id in found} == paths


def test_long_and_failing_paths_are_left_out_before_they_are_played(tmp_path, monkeypatch):
    monkeypatch.setattr("epo_trl.envs.scienceworld.gold.Jvm", NoJvm)
    suite = make_suite(tmp_path)
    ids = suite.task_ids("ood")
    for task_id, turns in zip(ids, (12, 13, 0, 3), strict=True):  # 0: the path did not solve it
        suite._gold._known[find_task(task_id)] = GoldPath(("wait",) * 14, turns)
    assert suite.demonstration_tasks("ood", max_turns=12) == [ids[0], ids[3]]
    assert suite.demonstration_tasks("ood", max_turns=12, count=1) == [ids[0]]
    assert suite.demonstration_tasks("ood", max_turns=2, count=9) == []


@pytest.mark.games
def test_demonstrations_are_made_from_gold_paths(folder):
    suite = make_suite(folder)
    [task_id] = suite.demonstration_tasks("ood", max_turns=30, count=1)
    path = suite._gold.path(*find_task(task_id))
    tokenizer = byte_tokenizer()
    context = context_of(tokenizer, template=PromptTemplate.load("plain"))
    [turns] = expert_episodes(suite, [(task_id, 0)], context, max_turns=path.turns)
    shown = [tokenizer.decode(turn.response_ids, skip_special_tokens=True) for turn in turns]
    assert [text.split("<action> ")[1].removesuffix(" </action>") for text in shown] == list(path.actions[: path.turns])
    assert list(expert_episodes(suite, [(task_id, 0)], context, max_turns=path.turns - 1)) == []
    with pytest.raises(ValueError, match="mistake_rate: expected 0.*got 0.5"):
        list(expert_episodes(suite, [(task_id, 0)], context, max_turns=9, mistake_rate=0.5))


WALK = ("open door to hall", "go to hall", "go to kitchen")


@pytest.mark.parametrize(
    ("path", "by_teleport"),
    [
        (
            (*WALK, "focus on ant", *WALK, "wait"),
            ("teleport to kitchen", "focus on ant", "teleport to kitchen", "wait"),
        ),
        (("go to hall",), ("teleport to hall",)),
        (("wait", "open door to hall", "wait"), ("wait", "open door to hall", "wait")),  # it goes nowhere
        ((*WALK, "open door to bedroom"), (*WALK, "open door to bedroom")),  # ends on the way
        ((), ()),
    ],
)
def test_a_walk_is_one_teleport_to_where_it_ends(path, by_teleport):
    assert with_teleports(path, 1.0, random.Random(0)) == by_teleport
    assert with_teleports(path, 0.0, random.Random(0)) == path


def test_walks_are_left_out_one_by_one_at_the_given_rate():
    expert = GoldExpert(lambda task_id: (*WALK, "focus on ant", *WALK), teleport_rate=0.3, seed=1)
    teleports = []
    for _ in range(1000):
        expert.reset("start", info())
        acts = [expert.act("start", info())[1] for _ in range(7)]
        teleports.append(acts.count("teleport to kitchen"))
    assert 430 <= teleports.count(0) <= 550 and 370 <= teleports.count(1) <= 470 and 60 <= teleports.count(2) <= 120


def info(accepted=True):
    return {"task_id": "t", "accepted": accepted}


def test_the_expert_repeats_what_was_not_understood_and_answers_only_when_asked():
    expert = GoldExpert(lambda task_id: ("open door", "move seed to pot", "0", "wait"))
    expert.reset("start", info())
    assert expert.act("start", info())[1] == "open door"
    assert expert.act("No known action matches that input.", info(accepted=False))[1] == "open door"
    assert expert.act("It is open.", info())[1] == "move seed to pot"
    assert expert.act("Ambiguous request: Please enter the number", info())[1] == "0"
    assert expert.act("You move it.", info())[1] == "wait"
    assert expert.act("You wait.", info()) == DONE
    expert.reset("start", info())
    acts = [expert.act("start", info())[1] for _ in range(3)]
    assert acts == ["open door", "move seed to pot", "wait"]
