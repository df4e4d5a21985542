"""A run goes on from its newest whole checkpoint."""

import warnings
from types import SimpleNamespace

import pytest
from trl import ModelConfig

from epo_trl.experiment import SealCheckpoints, newest_checkpoint
from epo_trl.recipe import parse_recipe
from epo_trl.trainers import EPOConfig
from epo_trl.trainers.checkpoint_files import MANIFEST, checkpoints, damage, last_checkpoint, rotate, seal


def checkpoint(folder, step, *, whole=True):
    path = folder / f"checkpoint-{step}"
    (path / "global_step").mkdir(parents=True)
    (path / "model.safetensors").write_bytes(b"weights")
    (path / "global_step" / "optimizer.pt").write_bytes(b"moments")
    if whole:
        seal(path)
    return path


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def test_a_run_that_never_saved_starts_anew(tmp_path):
    assert last_checkpoint(tmp_path / "missing") is None
    assert last_checkpoint(tmp_path) is None


def test_the_newest_checkpoint_is_told_by_its_number_not_by_its_name(tmp_path):
    checkpoint(tmp_path, 9)
    newest = checkpoint(tmp_path, 10)
    (tmp_path / "checkpoint-best").mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert last_checkpoint(tmp_path) == str(newest)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda path: (path / MANIFEST).unlink(), "manifest.json is missing"),
        (lambda path: truncate(path / MANIFEST), "manifest.json is damaged"),
        (lambda path: truncate(path / "model.safetensors"), "model.safetensors is damaged: it has 6 bytes, 7 were"),
        (lambda path: (path / "global_step" / "optimizer.pt").unlink(), "global_step/optimizer.pt is missing"),
    ],
    ids=["cut off", "list truncated", "file truncated", "file lost"],
)
def test_a_checkpoint_that_is_not_whole_is_passed_over_with_a_warning(tmp_path, harm, message):
    whole, newest = checkpoint(tmp_path, 2), checkpoint(tmp_path, 4)
    assert damage(newest) is None
    harm(newest)
    with pytest.warns(UserWarning, match=f"checkpoint-4 is passed over: .*{message}"):
        assert last_checkpoint(tmp_path) == str(whole)
    (whole / MANIFEST).unlink()
    with pytest.warns(UserWarning):
        assert last_checkpoint(tmp_path) is None


def left(folder):
    return [path.name for path in checkpoints(folder)]


def test_rotation_deletes_what_is_not_whole_first_then_the_oldest(tmp_path):
    for step in (2, 4, 6, 8):
        checkpoint(tmp_path, step, whole=step != 6)
    rotate(tmp_path, None, keep=set())
    rotate(tmp_path, 3, keep=set())
    assert left(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-8"]
    rotate(tmp_path, 1, keep={str(tmp_path / "checkpoint-2")})
    assert left(tmp_path) == ["checkpoint-2"]


def test_a_checkpoint_of_another_trainer_is_sealed_by_the_callback(tmp_path):
    checkpoint(tmp_path, 5, whole=False)
    args = SimpleNamespace(output_dir=str(tmp_path), should_save=True, process_index=0, world_size=1)
    with pytest.warns(UserWarning, match="passed over"):
        assert newest_checkpoint(args) is None
    SealCheckpoints().on_save(args, SimpleNamespace(global_step=5), None)
    assert newest_checkpoint(args) == str(tmp_path / "checkpoint-5")


def test_the_suite_of_a_recipe_knows_the_settings_that_a_resumed_run_has_to_share(tmp_path):
    argv = ["--games", "generated", "--n_train", "5", "--games_seed", "3", "--use_cpu", "true", "--bf16", "false"]
    suite, *_ = parse_recipe(EPOConfig, ModelConfig, environment="alfworld", argv=argv)
    assert suite.settings["games_seed"] == 3 and suite.settings["n_train"] == 5
    assert {"n_iid", "alfworld_data"} & suite.settings.keys() == set()
