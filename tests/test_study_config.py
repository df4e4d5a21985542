"""The YAML of a study: what is wrong with it is said before anything runs, and names are data."""

import re
from pathlib import Path

import pytest
import yaml

from epo_trl.errors import InputError
from epo_trl.lab.study.config import load_study
from epo_trl.lab.study.run_plan import folder_names, plan

ROOT = Path(__file__).parents[1]
TRAIN = {"recipe": "train.py", "config": "train.yaml"}


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

    def write(text=None, **changes):
        base = {"train": dict(TRAIN), "seeds": [4, 5], "arms": {"a": {}, "b": {"lr": 2}}}
        Path("my_study.yaml").write_text(text or yaml.safe_dump({**base, **changes}, sort_keys=False))
        return load_study("my_study.yaml")

    return write


def settings(study):
    return {run.name: dict(run.settings) for run in plan(study, Path("runs"))}


def test_a_run_has_the_fields_of_the_config_the_arm_and_the_study(written):
    study = written(train={**TRAIN, "sizes": {"a": 3}}, warm_start={"recipe": "sft.py", "config": "sft.yaml"})
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


def test_without_a_warm_start_the_config_says_where_a_run_begins(written):
    assert {run["model_name_or_path"] for run in settings(written()).values()} == {"tiny"}


def test_an_arm_may_have_its_own_recipe_config_and_seeds(written):
    arms = {"a": {}, "evolved": {"recipe": "other.py", "config": "other.yaml", "seeds": [5], "rounds": 1}}
    study = written(train={**TRAIN, "lr": 5}, arms=arms)
    runs = {run.name: run for run in plan(study, Path("runs"))}
    assert list(runs) == ["a-seed4", "a-seed5", "evolved-seed5"]
    assert runs["a-seed4"].settings["lr"] == 5
    own = runs["evolved-seed5"]
    assert own.settings == {"rounds": 1, "seed": 5, "output_dir": "runs/evolved-seed5"}  # not train's changes
    assert own.recipe == Path("other.py")


def test_all_that_decides_the_result_is_in_the_digest_and_no_path_of_output_is(written):
    warm = {"recipe": "sft.py", "config": "sft.yaml"}

    def digest(folder="runs", **changes):
        return plan(written(**{"warm_start": warm, **changes}), Path(folder))[0].digest

    one = digest()
    assert digest("elsewhere") == one == digest(window=3, arms={"a": {}})
    assert digest(arms={"a": {"resume_with_changes": True}}) == one  # a study may need it for one of the seeds
    others = [digest(warm_start={**warm, "max_steps": 8}), digest(seeds=[5]), digest(arms={"a": {"lr": 3}}),
              digest(train={**TRAIN, "recipe": "other.py"}), digest(warm_start=None)]  # fmt: skip
    assert len({one, *others}) == 6
    Path("train.yaml").write_text("# the same, in words\n" + Path("train.yaml").read_text())
    assert digest() == one


def test_arms_and_seeds_are_chosen_on_the_command_line(written):
    study = written(arms={"a": {}, "b": {}, "c": {}}).chosen(["b", "c"], [7])
    assert [run.name for run in plan(study, Path("runs"))] == ["b-seed7", "c-seed7"]
    whole = written(arms={"a": {}, "b": {}, "c": {}})
    assert whole.chosen(None, None) == whole == whole.joined(whole)
    assert [arm.seeds for arm in whole.joined(study).arms] == [(4, 5), (4, 5, 7), (4, 5, 7)]
    with pytest.raises(InputError, match=r"--arms: expected names from 'b', 'c', got 'x'"):
        study.chosen(["x"])
    with pytest.raises(InputError, match="--seeds: .*got 7 more than once"):
        study.chosen(None, [7, 7])


def test_names_of_arms_become_distinct_folders_that_stay_when_others_come():
    names = ["GRPO", "ref-nucleus .1", "a/../b", "a b", "a_b", "..", "warm start", "λ", "β", "x\u200by"]
    found = folder_names(names)
    assert len({short.lower() for short in found.values()}) == len(names)
    assert all(Path(short).name == short and short.isascii() and short[0] not in ".-" for short in found.values())
    assert found["ref-nucleus .1"] == "ref-nucleus-.1" and "warm-start" not in found.values()
    assert folder_names(reversed(names)) == found == {name: folder_names([name])[name] for name in names}


@pytest.mark.parametrize("other", ["grpo", "GRPO+", "-GRPO"])
def test_arms_that_would_share_a_folder_are_refused(written, other):
    """A name that depended on the others would send what is kept of an arm to another one."""
    with pytest.raises(InputError, match=f"arms: 'GRPO' and '{re.escape(other)}' would share the folder 'grpo'"):
        plan(written(arms={"GRPO": {}, other: {}}), Path("runs"))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"seed": 1}, "seed: unknown; expected train, seeds"),
        ({"seeds": [1, 1]}, "seeds: .*got 1 more than once"),
        ({"seeds": 3}, "seeds: expected a list of integers .*got 3"),
        ({"seeds": [True]}, "seeds: .*got"),
        ({"arms": {}}, "arms: .*got {}"),
        ({"arms": {0.1: {}}}, "arms: expected names .*got 0.1"),
        ({"arms": {"a\nb": {}}}, "arms: expected names .*got"),
        ({"arms": {"a": 3}}, "arms: 'a': .*got 3"),
        ({"arms": {"a": {"seed": 3}}}, "'a': seed: the study sets it"),
        ({"arms": {"a": {"config": "no.yaml"}}}, "'a': config: expected a file, got no.yaml"),
        ({"arms": {"a": {"seeds": []}}}, "'a': seeds: .*got"),
        ({"baseline": "x"}, "baseline: expected one of the arms 'a', 'b', got 'x'"),
        ({"train": {"recipe": "train.py"}}, "train: config is missing"),
        ({"train": {**TRAIN, "output_dir": "x"}}, "train: output_dir: the study sets it"),
        ({"window": 0}, "window: .*got 0"),
        ({"solved": 80}, "solved: expected a number from 0 to 1, got 80"),
        ({"name": "../x"}, "name: .*got '../x'"),
        ({"arms": {"a": False}}, "arms: 'a': expected 'field: value' pairs, got False"),
        ({"train": {**TRAIN, "recipe": 5}}, "train: recipe: expected a string, got 5"),
        ({"train": {**TRAIN, "seeds": [1]}}, "train: seeds: not allowed here"),
        ({"solved": 0.2}, "trapped: .* 0.2, got 0.5"),
    ],
)
def test_what_is_wrong_is_named(written, changes, says):
    with pytest.raises(InputError) as error:
        written(**changes)
    assert re.search(says, str(error.value))


def test_a_name_that_is_there_twice_is_refused(written):
    text = "train: {recipe: train.py, config: train.yaml}\nseeds: [1]\narms:\n  a: {lr: 1}\n  a: {lr: 2}\n"
    with pytest.raises(InputError, match="'a' occurs 2 times.*line 4"):
        written(text)


def test_a_mapping_that_overrides_a_merged_key_can_itself_be_merged(written):
    text = "train: {recipe: train.py, config: train.yaml}\nseeds: [1]\narms:\n"
    text += "  a: {sizes: {deep: &own {<<: {w: 1}, w: 2}}}\n  b: {sizes: {<<: *own, v: 3}}\n"
    runs = settings(written(text))
    assert runs["a-seed1"]["sizes"] == {"deep": {"w": 2}} and runs["b-seed1"]["sizes"] == {"w": 2, "v": 3}


def test_a_model_beside_a_warm_start_is_refused(written):
    study = written(warm_start={"recipe": "sft.py", "config": "sft.yaml"}, arms={"a": {"model_name_or_path": "x"}})
    with pytest.raises(InputError, match="'a': model_name_or_path: runs begin with the warm start"):
        plan(study, Path("runs"))


def test_a_run_that_would_leave_no_log_is_refused(written):
    with pytest.raises(InputError, match="arms: 'a': save_strategy: .*got 'no'"):
        plan(written(arms={"a": {"save_strategy": False}}), Path("runs"))  # YAML's own word for no
    with pytest.raises(InputError, match="arms: 'a': save_strategy: expected 'steps' or 'epoch'.*got 'best'"):
        plan(written(arms={"a": {"save_strategy": "best"}}), Path("runs"))
    Path("train.yaml").write_text("save_strategy: no\n")
    with pytest.raises(InputError, match="train.yaml: save_strategy: .*got 'no'"):
        plan(written(arms={"a": {}}), Path("runs"))


def test_a_value_of_which_no_checksum_can_be_made_is_named(written):
    with pytest.raises(InputError, match="arms: 'a': sizes: .*not supported between"):
        plan(written(arms={"a": {"sizes": {1: 2, "b": 3}}}), Path("runs"))
    text = "train: {recipe: train.py, config: train.yaml}\nseeds: [1]\narms: {a: {sizes: &it {b: *it}}}\n"
    with pytest.raises(InputError, match="arms: 'a': sizes: .*Circular reference"):
        plan(written(text), Path("runs"))


def test_a_shipped_study_is_known_by_name_and_its_recipes_where_there_is_no_clone(tmp_path, monkeypatch):
    here = load_study("studies/smoke.yaml")
    recipes = [run.identity for run in plan(here, tmp_path)]
    monkeypatch.chdir(tmp_path)
    for name in ("smoke", "studies/smoke.yaml"):
        there = load_study(name)
        assert there.name == "smoke" and [run.identity for run in plan(there, tmp_path)] == recipes
        assert all(run.recipe.is_file() and run.config.is_file() for run in plan(there, tmp_path))
    with pytest.raises(InputError, match=r"CONFIG: expected a YAML file or one of .*smoke.*, got 'smok'"):
        load_study("smok")
