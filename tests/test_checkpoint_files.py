"""A run goes on from its newest complete checkpoint, and knows models by their weights."""

from epo_trl.runs.checkpoint_files import STATE_FILE, last_checkpoint, what_model


def test_the_newest_complete_checkpoint_is_told_by_its_number_not_by_its_name(tmp_path):
    assert last_checkpoint(tmp_path / "missing") is last_checkpoint(tmp_path) is None
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-11", "checkpoint-best"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").touch()
        if name != "checkpoint-11":  # it was killed while this one was written
            (tmp_path / name / STATE_FILE).touch()
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")


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
