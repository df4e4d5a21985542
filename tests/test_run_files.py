"""A run goes on from its newest complete checkpoint, and knows models by their weights."""

import pytest
from run_kit import left

from epo_trl.runs.files import STATE_FILE, last_checkpoint, rotate, what_model


def make_checkpoints(folder, *names, incomplete="checkpoint-11"):
    for name in (*names, incomplete):  # it was killed while the last one was written
        (folder / name).mkdir()
        (folder / name / "model.safetensors").touch()
    for name in names:
        (folder / name / STATE_FILE).touch()


def test_the_newest_complete_checkpoint_is_told_by_its_number_not_by_its_name(tmp_path):
    assert last_checkpoint(tmp_path / "missing") is last_checkpoint(tmp_path) is None
    make_checkpoints(tmp_path, "checkpoint-9", "checkpoint-10", "checkpoint-best")
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")


@pytest.mark.parametrize(
    ("limit", "best", "kept"),
    [(None, None, [2, 4, 9, 10, 11]), (3, None, [4, 9, 10, 11]), (2, 2, [2, 10, 11]), (1, 2, [2, 10, 11]),
     (1, None, [10, 11]), (5, None, [2, 4, 9, 10, 11])],
)  # fmt: skip
def test_rotation_keeps_the_last_complete_checkpoint_and_the_best(tmp_path, limit, best, kept):
    make_checkpoints(tmp_path, *(f"checkpoint-{step}" for step in (2, 4, 9, 10)))
    rotate(tmp_path, limit, best and f"elsewhere/checkpoint-{best}")
    assert left(tmp_path) == [f"checkpoint-{step}" for step in kept]


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
