"""The ALFWorld suites keep the contract and say what is wrong with their input."""

import json
import shutil
import warnings

import pytest
from alfworld_games import SMALL, edit

from epo_trl.envs import EnvError
from epo_trl.envs.alfworld import AlfworldData, GeneratedAlfworld
from epo_trl.envs.alfworld.game_files import DESCRIPTION_FILE, GAME_FILE, load_game
from epo_trl.envs.alfworld.generator import write_games
from epo_trl.envs.alfworld.notes import AgentNotes
from epo_trl.envs.alfworld.pddl import TASK_TYPES
from epo_trl.envs.testing import EnvContract
from epo_trl.errors import EpoTrlError


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    out = tmp_path_factory.mktemp("alfworld")
    write_games(out, 8, 3, 3, 2, SMALL)
    return out


class TestGeneratedAlfworld(EnvContract):
    expert_wins = 0.8

    def make_suite(self):
        return GeneratedAlfworld(n_train=60, n_iid=12, n_ood=12)


class TestAlfworldData(EnvContract):
    expert_wins = 0.9

    @pytest.fixture(autouse=True)
    def _games(self, written):
        self.path = written

    def make_suite(self):
        return AlfworldData(self.path)


def test_the_first_observation_is_the_room_without_banner_and_task():
    suite = GeneratedAlfworld(n_train=6)
    for task_id in suite.task_ids("train"):
        observation, info = suite.make_env().reset(options={"task_id": task_id})
        assert observation.startswith("You are in the middle of a room. Looking quickly around you, you see a ")
        assert "Your task" not in observation and info["task"]
        assert info["task_type"] in TASK_TYPES
        assert (info["visited"], info["holding"], info["here"]) == ((), "nothing", "the middle of the room")
        assert {f"go to {name}" for name in info["unvisited"]} == {
            action for action in info["admissible_actions"] if action.startswith("go to ")
        }
        assert info["actions_here"] == ()


def test_the_step_that_wins_is_the_only_one_with_a_reward():
    suite = GeneratedAlfworld(n_train=1, task_types=["pick_and_place_simple"])
    env, expert = suite.make_env(), suite.make_expert()
    observation, info = env.reset(options={"task_id": "train/0"})
    expert.reset(observation, info)
    rewards, terminated = [], False
    while not terminated:
        observation, reward, terminated, truncated, info = env.step(expert.act(observation, info)[1])
        rewards.append(reward)
        assert not truncated and info["won"] == terminated
    assert rewards == [0.0] * (len(rewards) - 1) + [1.0]
    assert env.step("look")[1] == 0.0


def test_an_inadmissible_action_changes_neither_the_game_nor_the_notes():
    env = GeneratedAlfworld(n_train=1).make_env()
    _, before = env.reset(options={"task_id": "train/0"})
    for action in ("fly", "", "take mug 99 from desk 1", "Go to the fridge, please. " * 50):
        observation, reward, terminated, _, info = env.step(action)
        assert (observation, reward, terminated) == ("Nothing happens.", 0.0, False)
        assert info == before


def test_the_notes_follow_an_episode():
    notes = AgentNotes(
        "You are in the middle of a room. Looking quickly around you, you see a bed 1, a safe 1, and a shelf 2."
    )
    assert notes.unvisited == ("bed 1", "safe 1", "shelf 2")
    for text in ("You arrive at shelf 2. On the shelf 2, you see a cd 1.", "You pick up the cd 1 from the shelf 2."):
        notes.note(text)
    assert (notes.visited, notes.holding, notes.here) == (("shelf 2",), "cd 1", "shelf 2")
    notes.note("You arrive at bed 1. On the bed 1, you see nothing.")
    notes.note("You move the cd 1 to the bed 1.")
    assert (notes.visited, notes.unvisited) == (("shelf 2", "bed 1"), ("safe 1",))
    assert notes.holding == "nothing"
    notes.note("You arrive at shelf 2. On the shelf 2, you see nothing.")
    notes.note("You open the safe 1. The safe 1 is open. In it, you see a pen 1.")  # it is beside the shelf
    assert (notes.visited, notes.unvisited, notes.here) == (("shelf 2", "bed 1", "safe 1"), (), "shelf 2")


def test_what_the_task_names_is_noted_where_it_was_last_seen():
    notes = AgentNotes("you see a bed 1, a desk 1, and a drawer 2.", "look at cd under the desklamp")

    def noted(*texts):
        for text in texts:
            notes.note(text)
        return notes.fields(())["noted"]

    assert noted("You arrive at bed 1. On the bed 1, you see a pillow 1.") == ()
    seen = noted("You arrive at desk 1. On the desk 1, you see a cd 2, a pen 1, and a desklamp 1.")
    assert seen == ("cd 2 in desk 1", "desklamp 1 in desk 1")
    assert noted("You pick up the cd 2 from the desk 1.") == ("desklamp 1 in desk 1",)
    assert noted("You move the cd 2 to the bed 1.") == ("desklamp 1 in desk 1", "cd 2 in bed 1")
    assert noted("You move the pen 1 to the bed 1.") == ("desklamp 1 in desk 1", "cd 2 in bed 1")
    assert noted("You open the drawer 2. The drawer 2 is open. In it, you see a cd 1.")[-1] == "cd 1 in drawer 2"
    assert "cd 2 in bed 1" not in noted("On the bed 1, you see nothing.")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"max_receptacles": 6}, "no game of the split 'ood'"),
        ({"task_types": ["pick_up"]}, "task_types.*pick_and_place_simple.*pick_up"),
        ({"task_types": ["look_at_obj_in_light"], "room_types": ["bathrooms"]}, "look_at_obj_in_light"),
    ],
)
def test_a_bad_setting_is_named_when_the_suite_is_made(bad, message):
    with pytest.raises(EpoTrlError, match=message):
        GeneratedAlfworld(**bad)


def test_a_task_is_a_folder_below_the_games(written, tmp_path):
    """An absolute path or one with ".." plays no game, wherever it leads; nor does a name that no file can have."""
    env, (task_id, *_) = AlfworldData(written).make_env(), AlfworldData(written).task_ids("train")
    env.reset(options={"task_id": task_id})
    here = written / "json_2.1.1" / task_id
    for bad in (str(here), f"../json_2.1.1/{task_id}", f"/../..{here}", "x" * 5000, "a/" * 5000, "a\0b"):
        with pytest.raises(EnvError, match=f"task_id: expected a folder below {written / 'json_2.1.1'} .*, got"):
            env.reset(options={"task_id": bad})


@pytest.fixture
def copied(written, tmp_path):
    shutil.copytree(written, tmp_path / "data")
    return tmp_path / "data"


def first_game(folder):
    return min((folder / "json_2.1.1" / "train").rglob(GAME_FILE))


def test_the_lists_of_stored_games(written, tmp_path, monkeypatch):
    suite = AlfworldData(written / "json_2.1.1")
    for split, folder, count in (("train", "train/", 8), ("iid", "valid_seen/", 3), ("ood", "valid_unseen/", 3)):
        ids = suite.task_ids(split)
        assert len(ids) == count and all(task_id.startswith(folder) for task_id in ids)
    kind = TASK_TYPES[0]
    kept = AlfworldData(written, task_types=[kind]).task_ids("train")
    assert kept and all(task_id.startswith(f"train/{kind}-") for task_id in kept)
    assert suite.name == "alfworld-generated"
    (tmp_path / "json_2.1.1" / "train").mkdir(parents=True)
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    assert AlfworldData().name == "alfworld"


def test_a_missing_folder_says_how_to_get_games(tmp_path, monkeypatch):
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    with pytest.raises(EnvError, match="ALFWORLD_DATA: expected .*got ''.*--games generated.*epo-trl games"):
        AlfworldData()
    with pytest.raises(EnvError, match=f"{tmp_path}/nowhere.*alfworld-download"):
        AlfworldData(tmp_path / "nowhere")


def test_a_damaged_file_is_named(copied):
    path = first_game(copied)
    path.write_text("{")
    with pytest.raises(EnvError, match=f"{path}.*alfworld-download"):
        AlfworldData(copied).task_ids("train")


def test_games_that_the_fast_engine_does_not_know_are_named_before_training(copied):
    path = first_game(copied)
    game = edit(load_game(path), "", "(isHaunted agent1)")
    path.write_text(json.dumps(json.loads(game.as_json()) | {"solvable": True}))
    with pytest.raises(EnvError, match=f"{path}.*ishaunted.*textworld"):
        AlfworldData(copied).task_ids("train")
    assert len(AlfworldData(copied, engine="textworld").task_ids("train")) == 8


def test_what_alfworld_leaves_out_is_left_out_and_a_folder_that_lacks_a_file_is_named(copied):
    root = copied / "json_2.1.1" / "train"
    first, second, third, *_ = sorted(root.rglob(GAME_FILE))
    first.write_text(json.dumps(json.loads(first.read_text()) | {"solvable": False}))
    for other in (
        "pick_and_place_simple-AppleSliced-None-Fridge-1",
        "pick_and_place_with_movable_recep-Cup-Pan-Sink-1",
    ):
        shutil.copytree(third.parent, root / other / "trial_T1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(AlfworldData(copied).task_ids("train")) == 7
    second.unlink()
    (third.parent / DESCRIPTION_FILE).unlink()
    with pytest.warns(UserWarning, match=rf"train: 5 games, but 2 folders lack a file, for example {second.parent}"):
        assert len(AlfworldData(copied).task_ids("train")) == 5
