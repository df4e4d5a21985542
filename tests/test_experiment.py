"""A run goes on from its newest whole checkpoint."""

from epo_trl.experiment import last_checkpoint


def checkpoint(folder, step, *files):
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    for file in files:
        (path / file).write_text("{}")
    return str(path)


def test_a_run_that_never_saved_starts_anew(tmp_path):
    assert last_checkpoint(str(tmp_path / "missing")) is None
    assert last_checkpoint(str(tmp_path)) is None


def test_the_newest_checkpoint_is_told_by_its_number_not_by_its_name(tmp_path):
    checkpoint(tmp_path, 9, "trainer_state.json")
    newest = checkpoint(tmp_path, 10, "trainer_state.json")
    assert last_checkpoint(str(tmp_path)) == newest


def test_a_checkpoint_that_was_cut_off_is_passed_over(tmp_path):
    whole = checkpoint(tmp_path, 2, "model.safetensors", "trainer_state.json", "epo_state.json")
    checkpoint(tmp_path, 4, "model.safetensors", "trainer_state.json")
    assert last_checkpoint(str(tmp_path), complete="epo_state.json") == whole
