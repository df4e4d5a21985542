"""The YAML of a study: what is wrong with it is said before anything runs, and names are data."""

import re
from pathlib import Path

import pytest
import yaml

from epo_trl.errors import InputError
from epo_trl.lab.study.config import folder_names, load_study, plan

TRAIN = {"recipe": "train.py", "config": "train.yaml"}
WARM = {"recipe": "sft.py", "config": "sft.yaml"}


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Returns a function that writes a study beside a recipe and its config, and reads it."""
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "sft.py", "other.py"):
        Path(name).write_text("")
    Path("train.yaml").write_text(
        "lr: 1\nsizes: {a: 1, b: 2}\noutput_dir: somewhere\nmodel_name_or_path: tiny\nseed: 9\n"
    )
    Path("sft.yaml").write_text("max_steps: 7\n")
    Path("other.yaml").write_text("rounds: 3\n")

    def write(**changes):
        base = {"train": dict(TRAIN), "seeds": [4, 5, 4], "arms": {"a": {}, "b": {"lr": 2}}}
        Path("my_study.yaml").write_text(yaml.safe_dump({**base, **changes}, sort_keys=False))
        return load_study("my_study.yaml")

    return write


def settings(study):
    return {run.name: dict(run.settings) for run in plan(study, Path("runs"))}


def test_a_run_has_the_fields_of_the_config_the_arm_and_the_study(written):
    study = written(train={**TRAIN, "sizes": {"a": 3}}, warm_start=WARM)
    assert settings(study) == {
        f"{arm}-seed{seed}": {
            "lr": lr, "sizes": {"a": 3}, "seed": seed, "output_dir": f"runs/{arm}-seed{seed}",
            "model_name_or_path": f"runs/warm-start-seed{seed}",
        }
        for seed in (4, 5) for arm, lr in (("a", 1), ("b", 2))
    }  # fmt: skip
    run, other, *_ = plan(study, Path("runs"))
    assert run.needs == other.needs and run.needs.recipe == Path("sft.py")
    assert run.needs.settings == {"max_steps": 7, "seed": 4, "output_dir": "runs/warm-start-seed4"}
    assert (study.name, study.baseline, study.seeds) == ("my_study", "a", (4, 5))
    assert {run["model_name_or_path"] for run in settings(written()).values()} == {"tiny"}  # without a warm start


def test_an_arm_may_have_its_own_recipe_config_and_seeds(written):
    arms = {"a": None, "evolved": {"recipe": "other.py", "config": "other.yaml", "seeds": [5], "rounds": 1}}
    runs = {run.name: run for run in plan(written(train={**TRAIN, "lr": 5}, arms=arms), Path("runs"))}
    assert list(runs) == ["a-seed4", "a-seed5", "evolved-seed5"] and runs["a-seed4"].settings["lr"] == 5
    own = runs["evolved-seed5"]
    assert own.settings == {"rounds": 1, "seed": 5, "output_dir": "runs/evolved-seed5"}  # not train's changes
    assert own.recipe == Path("other.py")


def test_all_that_decides_the_result_is_in_the_identity_and_no_path_of_output_is(written):
    def identity(folder="runs", **changes):
        return plan(written(**{"warm_start": WARM, **changes}), Path(folder))[0].identity

    one = identity()
    assert identity("elsewhere") == one == identity(window=3, arms={"a": {}})
    assert identity(arms={"a": {"resume_with_changes": True}}) == one  # a study may need it for one of the seeds
    for changes in ({"warm_start": {**WARM, "max_steps": 8}}, {"seeds": [5]}, {"arms": {"a": {"lr": 3}}},
                    {"train": {**TRAIN, "recipe": "other.py"}}, {"warm_start": None}):  # fmt: skip
        assert identity(**changes) != one


def test_arms_and_seeds_are_chosen_on_the_command_line(written):
    whole = written(arms={"a": {}, "b": {}, "c": {}})
    study = whole.chosen(["b", "c"], [7])
    assert [run.name for run in plan(study, Path("runs"))] == ["b-seed7", "c-seed7"]
    assert whole.chosen(None, None) == whole == whole.joined(whole)
    assert [arm.seeds for arm in whole.joined(study).arms] == [(4, 5), (4, 5, 7), (4, 5, 7)]
    with pytest.raises(InputError, match=r"--arms: expected names from 'b', 'c', got 'x'"):
        study.chosen(["x"])


def test_names_of_arms_become_distinct_folders_that_stay_when_others_come():
    names = ["GRPO", "ref-nucleus .1", "a/../b", "a b", "a_b", "..", "x\u200by"]
    found = folder_names(names)
    assert len({short.lower() for short in found.values()}) == len(names)
    assert all(Path(short).name == short and short.isascii() and short[0] not in ".-" for short in found.values())
    assert found["ref-nucleus .1"] == "ref-nucleus-.1" and found[".."] == "arm"
    assert folder_names(reversed(names)) == found == {name: folder_names([name])[name] for name in names}
    with pytest.raises(InputError, match=r"arms: 'GRPO' and 'GRPO\+' would share the folder 'grpo'"):
        folder_names(["GRPO", "GRPO+"])  # a name that depended on the others would move an arm's results
    with pytest.raises(InputError, match="arms: 'warm-start' and 'warm start' would share the folder"):
        folder_names(["warm start"])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sead": 1}, "my_study.yaml: expected train, seeds, arms .*sead"),
        ({"arms": {}}, "my_study.yaml: expected train, seeds, arms"),
        ({"arms": {"a": {"seed": 3}}}, "a: seed: the study sets it"),
        ({"arms": {"a": {"config": "no.yaml"}}}, "config: expected a readable YAML file, got no.yaml"),
        ({"baseline": "x"}, "baseline: expected one of the arms a, b, got 'x'"),
        ({"train": {"recipe": "train.py"}}, "my_study.yaml: expected train, .*'config'"),
        ({"solved": 80}, "solved: expected a number from 0 to 1, got 80"),
        ({"warm_start": WARM, "arms": {"a": {"model_name_or_path": "x"}}}, "a: model_name_or_path: the study sets it"),
        ({"arms": {"a": {"save_strategy": False}}}, "a: save_strategy: .*got 'no'"),  # YAML's own word for no
    ],
)
def test_what_is_wrong_is_named(written, changes, says):
    with pytest.raises(InputError) as error:
        plan(written(**changes), Path("runs"))
    assert re.search(says, str(error.value))


def test_a_shipped_study_is_known_by_name_and_its_recipes_where_there_is_no_clone(tmp_path, monkeypatch):
    here = load_study("studies/smoke.yaml")
    recipes = [run.identity for run in plan(here, tmp_path)]
    monkeypatch.chdir(tmp_path)
    for name in ("smoke", "studies/smoke.yaml"):
        there = load_study(name)
        assert there.name == "smoke" and [run.identity for run in plan(there, tmp_path)] == recipes
        assert all(run.recipe.is_file() and run.config.is_file() for run in plan(there, tmp_path))
    with pytest.raises(InputError, match="CONFIG: expected a readable YAML file, got smok"):
        load_study("smok")
