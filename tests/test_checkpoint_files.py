"""A run goes on from its newest whole checkpoint."""

import warnings

import pytest
from run_kit import left
from trl import ModelConfig
from typed import parse_recipe

from epo_trl.runs.checkpoint_files import (
    MANIFEST,
    find_corruption,
    last_checkpoint,
    rotate,
    what_model,
    write_manifest,
)
from epo_trl.trainers import EPOConfig


def checkpoint(folder, step, *, whole=True):
    path = folder / f"checkpoint-{step}"
    (path / "global_step").mkdir(parents=True)
    (path / "model.safetensors").write_bytes(b"weights")
    (path / "global_step" / "optimizer.pt").write_bytes(b"moments")
    if whole:
        write_manifest(path)
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
        (lambda path: (path / MANIFEST).write_text("[]"), r"manifest.json is damaged \(it has no files"),
        (lambda path: (path / MANIFEST).write_text('{"files": {"a": 1}}'), "manifest.json is damaged"),
        (
            lambda path: (path / "model.safetensors").write_bytes(b"Weights"),
            "model.safetensors is damaged: its checksum",
        ),
        (lambda path: truncate(path / "model.safetensors"), "model.safetensors is damaged: it has 6 bytes, 7 were"),
        (lambda path: (path / "global_step" / "optimizer.pt").unlink(), "global_step/optimizer.pt is missing"),
    ],
    ids=["cut off", "no list", "other list", "other bytes", "truncated", "lost"],
)
def test_a_checkpoint_that_is_not_whole_is_passed_over_with_a_warning(tmp_path, harm, message):
    whole, newest = checkpoint(tmp_path, 2), checkpoint(tmp_path, 4)
    assert find_corruption(newest) is None
    harm(newest)
    with pytest.warns(UserWarning, match=f"checkpoint-4 is skipped: .*{message}"):
        assert last_checkpoint(tmp_path) == str(whole)
    (whole / MANIFEST).unlink()
    with pytest.warns(UserWarning):
        assert last_checkpoint(tmp_path) is None


def test_rotation_deletes_what_is_not_whole_first_then_the_oldest(tmp_path):
    for step in (2, 4, 6, 8):
        checkpoint(tmp_path, step, whole=step != 6)
    rotate(tmp_path, None, keep=set())
    rotate(tmp_path, 3, keep=set())
    assert left(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-8"]
    rotate(tmp_path, 1, keep={str(tmp_path / "checkpoint-2")})
    assert left(tmp_path) == ["checkpoint-2"]


def test_every_flipped_bit_is_found(tmp_path):
    """In each byte of each file, the list of the files among them."""
    path = checkpoint(tmp_path, 1)
    for file in [file for file in path.rglob("*") if file.is_file()]:
        content = file.read_bytes()
        for i in range(len(content)):
            file.write_bytes(content[:i] + bytes([content[i] ^ 1 << i % 8]) + content[i + 1 :])
            assert find_corruption(path, contents=True), (file.name, i)
        file.write_bytes(content)
    assert find_corruption(path, contents=True) is None


def test_a_model_is_known_by_its_weights_and_by_nothing_beside_them(tmp_path):
    names = ("model-1.safetensors", "model-2.safetensors", "pytorch_model.bin", "config.json", "training_args.bin")
    for name in names:
        (tmp_path / name).write_text(name)
    known = what_model(str(tmp_path))
    assert known.startswith("a folder of weights, XXH3 ")
    changed = {}
    for name in names:
        (tmp_path / name).write_text("other")
        changed[name] = what_model(str(tmp_path)) != known
        (tmp_path / name).write_text(name)
    assert list(changed.values()) == [True, True, True, False, False]
    assert what_model(str(tmp_path)) == known
    assert what_model("org/name") == "org/name" and what_model("") == ""


def test_the_suite_of_a_recipe_knows_the_settings_that_a_resumed_run_has_to_share(tmp_path):
    argv = ["--games", "generated", "--n_train", "5", "--games_seed", "3", "--use_cpu", "true", "--bf16", "false"]
    suite, *_ = parse_recipe(EPOConfig, ModelConfig, environment="alfworld", argv=argv)
    assert suite.settings["games_seed"] == 3 and suite.settings["n_train"] == 5
    assert {"n_iid", "alfworld_data"} & suite.settings.keys() == set()
