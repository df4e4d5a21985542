"""The ALFWorld suites keep the contract and say what is wrong with their input."""

import json
import shutil
import warnings

import pytest
from alfworld_games import SMALL, edit, play

from epo_trl.envs import EnvError
from epo_trl.envs.alfworld import AlfworldData, GeneratedAlfworld
from epo_trl.envs.alfworld.game_files import DESCRIPTION_FILE, GAME_FILE, find_games, load_game
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


def test_generated_games_on_disk_are_named_as_such(written, tmp_path):
    for path in (written, written / "json_2.1.1"):
        assert AlfworldData(path).name == "alfworld-generated"
    (tmp_path / "json_2.1.1").symlink_to(written / "json_2.1.1")
    (tmp_path / "other" / "train").mkdir(parents=True)
    assert AlfworldData(tmp_path).name == "alfworld-generated" and AlfworldData(tmp_path / "other").name == "alfworld"


class TestAlfworldData(EnvContract):
    expert_wins = 0.9

    @pytest.fixture(autouse=True)
    def _games(self, written):
        self.path = written

    def make_suite(self):
        return AlfworldData(self.path)


def test_every_rollout_of_a_group_starts_the_same():
    suite = GeneratedAlfworld(n_train=12)
    for task_id in suite.task_ids("train"):
        starts = [suite.make_env().reset(seed=seed, options={"task_id": task_id}) for seed in range(8)]
        assert all(start == starts[0] for start in starts)


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


def test_the_notes_come_from_the_texts_alone():
    suite = GeneratedAlfworld(n_train=24, seed=1)
    env = suite.make_env()
    for task_id in suite.task_ids("train"):
        log, _ = play(env, task_id, suite.make_expert())
        notes = AgentNotes(log[0][0], log[0][1]["task"])
        named = notes.unvisited
        for observation, info, *_ in log:
            notes.note(observation)
            assert notes.fields(info["admissible_actions"]).items() <= info.items()
            assert sorted(info["visited"] + info["unvisited"]) == sorted(named)
            assert set(info["actions_here"]) == {
                action
                for action in info["admissible_actions"]
                if not action.startswith(("go to ", "examine ")) and action not in ("look", "inventory", "help")
            }


def test_the_state_key_is_computed_only_when_a_reset_asks_for_it():
    env = GeneratedAlfworld(n_train=1).make_env()
    _, plain = env.reset(options={"task_id": "train/0"})
    _, keyed = env.reset(options={"task_id": "train/0", "state_key": True})
    assert keyed == plain | {"state_key": env._opened.play.key()}
    assert env.step("inventory")[4]["state_key"] == keyed["state_key"]
    assert env.step(keyed["admissible_actions"][0])[4]["state_key"] != keyed["state_key"]
    assert "state_key" not in env.reset(options={"task_id": "train/0"})[1]


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
    assert (notes.visited, notes.here) == (("shelf 2", "bed 1"), "shelf 2")


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


def test_reset_and_step_say_what_they_take():
    env = GeneratedAlfworld(n_train=3, n_iid=0, n_ood=0).make_env()
    with pytest.raises(EnvError, match="reset"):
        env.step("look")
    for options in (None, {}, {"task_id": 3}):
        with pytest.raises(EnvError, match="task_id"):
            env.reset(options=options)
    for bad in ("train/3", "train/-1", "train/x", "iid/0", "0", ""):
        with pytest.raises(EnvError, match="'train/0' to 'train/2'"):
            env.reset(options={"task_id": bad})


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"engine": "thor"}, "engine: .*'fast', 'textworld', got 'thor'"),
        ({"expert_search": "best"}, "expert_search: expected one of 'random', 'likely', got 'best'"),
        ({"n_iid": -1}, "n_iid: .*got -1"),
        ({"max_receptacles": 6}, "no game of the split 'ood'"),
        ({"task_types": ["pick_up"]}, "pick_up"),
    ],
)
def test_a_bad_setting_is_named_when_the_suite_is_made(bad, message):
    with pytest.raises(EpoTrlError, match=message):
        GeneratedAlfworld(**bad)


def test_a_missing_folder_says_how_to_get_games(tmp_path, monkeypatch):
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    with pytest.raises(
        EnvError, match="ALFWORLD_DATA is not set.*--games generated.*alfworld-download.*epo-trl games alfworld"
    ):
        AlfworldData()
    with pytest.raises(EnvError, match=f"{tmp_path}/nowhere.*alfworld-download"):
        AlfworldData(tmp_path / "nowhere")
    (tmp_path / "json_2.1.1" / "train").mkdir(parents=True)
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    with pytest.raises(EnvError, match="json_2.1.1/train: no playable games"):
        AlfworldData().task_ids("train")
    with pytest.raises(EnvError, match="valid_seen: no playable games"):
        AlfworldData().task_ids("iid")


def test_the_splits_of_stored_games_are_alfworlds_folders(written):
    suite = AlfworldData(written / "json_2.1.1")
    assert [len(suite.task_ids(split)) for split in suite.splits] == [8, 3, 3]
    for split, folder in (("train", "train/"), ("iid", "valid_seen/"), ("ood", "valid_unseen/")):
        assert all(task_id.startswith(folder) for task_id in suite.task_ids(split))
    with pytest.raises(EnvError, match="valid_seen/none"):
        suite.make_env().reset(options={"task_id": "valid_seen/none"})
    with pytest.raises(EnvError, match="task_types.*flying"):
        AlfworldData(written, task_types=["flying"])


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


@pytest.mark.parametrize("damage", ["", "{", "[1]", '{"solvable": true, "grammar": ""}'])
def test_a_damaged_file_is_named_before_training(copied, damage):
    path = first_game(copied)
    path.write_text(damage)
    with pytest.raises(EnvError, match=f"{path}.*alfworld-download"):
        AlfworldData(copied).task_ids("train")


def test_a_game_that_the_fast_engine_does_not_know_is_named_before_training(copied):
    path = first_game(copied)
    game = edit(load_game(path), "", "(isHaunted agent1)")
    path.write_text(json.dumps(json.loads(game.as_json()) | {"solvable": True}))
    with pytest.raises(EnvError, match=f"{path}.*ishaunted.*textworld"):
        AlfworldData(copied).task_ids("train")
    assert len(AlfworldData(copied, engine="textworld").task_ids("train")) == 8


def test_what_alfworld_leaves_out_is_left_out(copied):
    root = copied / "json_2.1.1" / "train"
    games = sorted(root.rglob(GAME_FILE))
    content = json.loads(games[0].read_text())
    games[0].write_text(json.dumps(content | {"solvable": False}))
    sliced = root / "pick_and_place_simple-AppleSliced-None-Fridge-1" / "trial_T1"
    shutil.copytree(games[2].parent, sliced)
    shutil.copytree(games[2].parent, root / "pick_and_place_with_movable_recep-Cup-Pan-Sink-1" / "trial_T1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(AlfworldData(copied).task_ids("train")) == 7
    found = find_games(copied, TASK_TYPES)
    assert str(found) == "13 games; left out: 1 not marked as solvable, 2 with movable receptacles or sliced objects"
    kind = TASK_TYPES[0]
    kept = AlfworldData(copied, task_types=[kind]).task_ids("train")
    assert kept and all(task_id.startswith(f"train/{kind}-") for task_id in kept)


def test_a_list_may_lie_on_another_disk(copied, tmp_path):
    before = AlfworldData(copied).task_ids("train")
    folder = copied / "json_2.1.1" / "train"
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    linked = AlfworldData(copied)
    assert linked.task_ids("train") == before
    linked.make_env().reset(seed=0, options={"task_id": before[0]})


@pytest.mark.parametrize("name", [GAME_FILE, DESCRIPTION_FILE])
def test_a_missing_file_is_counted_and_a_list_that_is_mostly_gone_is_refused(copied, name):
    files = sorted((copied / "json_2.1.1" / "train").rglob(name))
    files[0].unlink()
    with pytest.warns(UserWarning, match=rf"train: 7 games; left out: 1 without {name}.*{files[0].parent}"):
        assert len(AlfworldData(copied).task_ids("train")) == 7
    for path in files[1:5]:
        path.unlink()
    with pytest.raises(EnvError, match=f"3 games; left out: 5 without {name}"):
        AlfworldData(copied).task_ids("train")
    for path in files[5:]:
        path.unlink()
    with pytest.raises(EnvError, match=f"no playable games here .*8 without {name}"):
        AlfworldData(copied).task_ids("train")


def test_what_a_killed_writer_left_behind_is_no_game(copied):
    game = first_game(copied)
    shutil.copytree(game.parent, game.parent.parent / ".unfinished-1")
    assert len(AlfworldData(copied).task_ids("train")) == 8


def test_a_receptacle_beside_the_one_gone_to_counts_as_visited_once_it_is_opened_or_examined():
    notes = AgentNotes("Looking quickly around you, you see a drawer 2, a drawer 1, a shelf 1, and a bed 1.")
    notes.note("You arrive at drawer 1. The drawer 1 is closed.")
    notes.note("You open the drawer 2. The drawer 2 is open. In it, you see a pen 1.")
    notes.note("On the shelf 1, you see nothing.")
    assert (notes.visited, notes.unvisited) == (("drawer 1", "drawer 2", "shelf 1"), ("bed 1",))
    assert notes.here == "drawer 1"


def test_a_split_of_size_zero_does_not_exist():
    suite = GeneratedAlfworld(n_train=2, n_iid=0, n_ood=3)
    assert suite.splits == ("train", "ood")
    with pytest.raises(EnvError, match="split: .*got 'iid'"):
        suite.task_ids("iid")
