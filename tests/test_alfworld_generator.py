import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from alfworld_games import SMALL
from scripted_plan import scripted_plan

from epo_trl.envs.alfworld import generator
from epo_trl.envs.alfworld.game_files import GAME_FILE, load_game
from epo_trl.envs.alfworld.generator import generate, write_games
from epo_trl.envs.alfworld.pddl import TASK_TYPES
from epo_trl.envs.alfworld.rooms import DATA, HELD_OUT_ROOMS, alfred
from epo_trl.envs.alfworld.scene import Scene
from epo_trl.envs.alfworld.task_specs import Filters, task_specs, type_order
from epo_trl.envs.base import EnvError

SPLITS = ("train", "iid", "ood")


def in_another_process(code: str, hash_seed: str) -> str:
    root = str(Path(__file__).parents[1])
    env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": root}
    return subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True).stdout


def test_train_and_iid_share_no_recipe_and_ood_has_only_held_out_rooms():
    found = {}
    for split in SPLITS:
        rooms = [room for kinds in task_specs(split, Filters()).values() for room in kinds.values()]
        found[split] = {spec for room in rooms for group in room.values() for spec in group}
    assert not found["train"] & found["iid"]
    assert {spec.room for spec in found["ood"]} == HELD_OUT_ROOMS
    assert not HELD_OUT_ROOMS & {spec.room for split in ("train", "iid") for spec in found[split]}
    assert len(found["train"]) > 5 * len(found["iid"]) > 5 * 1000


def test_task_types_come_in_the_shares_of_the_real_games_evenly_spread():
    """The shares of the 3,553 real training games, in percent; see docs/alfworld.md."""
    real = dict(zip(TASK_TYPES, (22.2, 8.7, 18.3, 12.9, 15.0, 22.9), strict=True))
    order = type_order(TASK_TYPES)
    assert all(abs(order.count(name) / len(order) * 100 - share) < 3 for name, share in real.items())
    for length in range(1, len(order) + 1):
        assert all(abs(order[:length].count(name) - length * order.count(name) / len(order)) < 1 for name in real)
    for split in SPLITS:
        assert [generate(split, index, 0).spec.task_type for index in (0, 1, 24)] == [order[i] for i in (0, 1, 1)]


def test_rooms_hold_about_as_many_things_as_real_ones():
    """Against means of the real training games: things on the furniture and kinds of them, by the kind of room."""
    real = {"kitchens": (44.4, 24.0), "livingrooms": (20.9, 12.0), "bedrooms": (22.9, 12.6), "bathrooms": (15.6, 9.0)}
    seen, empty = defaultdict(list), []
    for index in range(138):
        generated = generate("train", index, 0)
        scene = Scene.of(generated.game)
        things = [thing for things in scene.start.contents.values() for thing in things]
        counts = len(things), len({scene.object_type[thing] for thing in things})
        seen[alfred().rooms[generated.spec.room].room_type].append(counts)
        empty.append(sum(not scene.start.contents.get(name) for name in scene.receptacles) / len(scene.receptacles))
    for name, expected in real.items():
        means = [statistics.fmean(values) for values in zip(*seen[name], strict=True)]
        assert means == pytest.approx(expected, rel=0.2)
    assert abs(len(seen["kitchens"]) / 138 - 0.475) < 0.1
    assert abs(statistics.fmean(empty) - 0.424) < 0.06


@pytest.mark.parametrize("split", SPLITS)
def test_the_scripted_plan_wins_and_the_game_is_not_won_before(split):
    for index in range(60):
        generated = generate(split, index, 11)
        scene = Scene.of(generated.game)
        assert scene.goal.task_type == generated.spec.task_type
        assert 3 <= len(scripted_plan(scene)) <= 14


def test_filters_hold_in_every_split():
    for split in SPLITS:
        for index in range(20):
            spec = generate(split, index, 0, SMALL).spec
            room = alfred().rooms[spec.room]
            assert room.room_type in ("bedrooms", "bathrooms") and len(room.receptacles) <= 16


def test_written_games_have_alfworlds_layout_and_are_the_generated_ones(tmp_path):
    assert write_games(tmp_path, 6, 2, 2, seed=4) == 10
    files = sorted((tmp_path / "json_2.1.1").rglob(GAME_FILE))
    assert {path.parts[-4] for path in files} == {"train", "valid_seen", "valid_unseen"}
    for path in files:
        trajectory = json.loads((path.parent / "traj_data.json").read_text())
        game = load_game(path)
        assert path.parent.parent.name.startswith(trajectory["task_type"] + "-")
        assert (path.parent / "initial_state.pddl").read_text() == game.problem
        assert json.loads(path.read_text())["solvable"] is True
    assert generate("train", 0, 4).game.problem in [load_game(path).problem for path in files]


def test_an_interrupted_call_is_completed_and_games_of_two_calls_are_not_mixed(tmp_path, monkeypatch):
    calls = iter([generate, generate])  # the third game is interrupted
    monkeypatch.setattr(generator, "generate", lambda *args: next(calls)(*args))
    with pytest.raises(StopIteration):
        write_games(tmp_path, 4, 1, 0)
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.rglob(GAME_FILE)}
    assert len(stamps) == 2
    monkeypatch.undo()
    write_games(tmp_path, 4, 1, 0)
    assert len(list(tmp_path.rglob(GAME_FILE))) == 5 and not list(tmp_path.rglob("*.partial"))
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items())
    for changes in ({"seed": 1}, {"filters": Filters(max_receptacles=9)}):
        with pytest.raises(EnvError, match='out: .*"seed": 0.*; choose another folder'):
            write_games(tmp_path, **{"n_train": 4, "n_iid": 1, "n_ood": 0, **changes})
    write_games(tmp_path, 5, 1, 1)
    assert len(list(tmp_path.rglob(GAME_FILE))) == 7
    (tmp_path / "generated.json").unlink()
    with pytest.raises(EnvError, match="out: expected a folder without other games"):
        write_games(tmp_path, 5, 1, 1)


def test_generated_games_need_neither_alfworld_nor_textworld_nor_numpy():
    code = """
import sys
for name in ("alfworld", "textworld", "numpy", "torch"):
    sys.modules[name] = None  # an import fails
from epo_trl.envs.alfworld import GeneratedAlfworld
suite = GeneratedAlfworld(1, 1, 1)
for split in suite.splits:
    env, expert = suite.make_env(), suite.make_expert()
    observation, info = env.reset(options={"task_id": f"{split}/0"})
    expert.reset(observation, info)
    for turn in range(100):
        observation, _, done, _, info = env.step(expert.act(observation, info)[1])
        if done:
            break
    print(split, info["won"])
"""
    assert in_another_process(code, "0") == "train True\niid True\nood True\n"


def test_the_shipped_rooms_rules_and_goals_are_those_of_the_package():
    from make_alfworld_data import files

    for name, text in files().items():
        assert (DATA / name).read_text(encoding="utf-8") == text, name
