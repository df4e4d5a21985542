"""One run to a folder: the lock names who holds it, goes with its process, and is there once for all ranks."""

import errno
import fcntl
import json
import os
import signal
import socket
import time
from types import SimpleNamespace

import pytest
from trainer_kit import make_trainer

from epo_trl.runs import run_lock as run_lock_module
from epo_trl.runs.run_lock import LOCK, RunningError, run_lock


def args_of(folder, rank=0):
    return SimpleNamespace(output_dir=str(folder), process_index=rank, world_size=1)


def take(folder):
    with run_lock(args_of(folder)):
        pass


@pytest.fixture
def other(tmp_path):
    """Returns the id of another process that holds the lock, until it is killed."""
    ready, tell = os.pipe()
    process = os.fork()
    if not process:
        with run_lock(args_of(tmp_path)):
            os.write(tell, b"x")
            time.sleep(60)
        os._exit(0)
    os.read(ready, 1)
    yield process
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


def test_a_second_run_is_refused_by_name_and_trains_nothing(tmp_path, other):
    here = socket.gethostname()
    says = rf"output_dir: {tmp_path} is in use by process {other} on {here} since 20\d\d-.*another output_dir"
    with pytest.raises(RunningError, match=says):
        take(tmp_path)
    trainer = make_trainer(tmp_path, max_steps=1, save_strategy="steps")
    for train in (trainer.train, trainer.train_to_end):
        with pytest.raises(RunningError, match=f"process {other} on"):
            train()
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]
    with run_lock(args_of(tmp_path / "another")), run_lock(args_of(tmp_path, rank=1)):
        pass  # the other ranks of the run that has it do not ask


def test_the_lock_of_a_killed_run_is_taken_over(tmp_path, other):
    os.kill(other, signal.SIGKILL)
    os.waitid(os.P_PID, other, os.WEXITED | os.WNOWAIT)
    with run_lock(args_of(tmp_path)):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    assert not (tmp_path / LOCK).exists()


def test_blocks_of_one_process_lie_within_each_other(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(KeyError), run_lock(args_of(tmp_path)):
        with run_lock(args_of(tmp_path / "link")):
            pass
        assert (tmp_path / LOCK).exists()
        raise KeyError
    assert not (tmp_path / LOCK).exists()


def test_a_run_on_another_machine_is_taken_for_alive_and_the_message_says_what_to_do(tmp_path):
    record = {"host": "elsewhere", "pid": 7, "since": "yesterday"}
    (tmp_path / LOCK).write_text(json.dumps(record))
    says = rf"process 7 on elsewhere since yesterday, which cannot be checked from .*delete {tmp_path / LOCK} and start"
    with pytest.raises(RunningError, match=says):
        take(tmp_path)
    assert json.loads((tmp_path / LOCK).read_text()) == record
    (tmp_path / LOCK).write_text('{"host": "elsewh')  # it was killed as it wrote this
    take(tmp_path)


def test_on_a_disk_without_locks_the_process_is_looked_for(tmp_path, other, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    says = f"process {other} on .*its id may belong to another program.*delete {tmp_path / LOCK} and start again"
    with pytest.raises(RunningError, match=says):
        take(tmp_path)
    record = json.loads((tmp_path / LOCK).read_text())
    # The first is beyond the largest there can be; a restarted container may give this process the id of the last run.
    for pid in (2**22 + 1, 10**30, "x", None, os.getpid(), 0, -1):
        (tmp_path / LOCK).write_text(json.dumps({**record, "pid": pid}))
        take(tmp_path)


def test_an_error_in_training_gives_the_folder_back(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=1)

    def fail(*_):
        assert (tmp_path / LOCK).exists()
        raise KeyError("in the first step")

    trainer.training_step = fail
    with pytest.raises(KeyError):
        trainer.train()
    assert not (tmp_path / LOCK).exists()


@pytest.mark.parametrize("record", [{"pid": 1, "since": "then"}, {"host": "elsewhere"}, {}, [], "[" * 100_000])
def test_a_record_that_does_not_say_who_holds_it_is_nobody_s(tmp_path, record):
    text = record if isinstance(record, str) else json.dumps(record)
    (tmp_path / LOCK).write_text(text)
    with run_lock(args_of(tmp_path)):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


def test_a_lock_that_is_held_is_refused_even_if_its_record_is_damaged(tmp_path, other):
    (tmp_path / LOCK).write_text('{"pid": 7}')
    with pytest.raises(RunningError, match="by another process. Wait"):
        take(tmp_path)


def test_a_folder_that_cannot_be_written_is_named_in_one_line(tmp_path, monkeypatch, error_of):
    """As a read-only file system answers; a test that runs as root cannot take its own rights away."""

    def read_only(path, *_, **__):
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(run_lock_module, "open", read_only, raising=False)
    line = error_of(lambda _: take(tmp_path))
    assert line.startswith("train.py: error: output_dir: expected a writable folder")
    assert f"got {tmp_path} (Read-only file" in line


def test_a_lock_that_was_not_written_is_not_held(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    def on_a_full_disk(*args, **given):
        file = open(*args, **given)
        file.write = full
        return file

    with monkeypatch.context() as patch:
        patch.setattr(run_lock_module, "open", on_a_full_disk, raising=False)
        with pytest.raises(OSError, match="No space"):
            take(tmp_path)
    with run_lock(args_of(tmp_path)):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


def test_a_folder_in_place_of_the_lock_is_named_in_one_line(tmp_path, error_of):
    (tmp_path / LOCK).mkdir()
    said = f"output_dir: expected {tmp_path / LOCK} to be a file or absent, got a folder; delete it"
    assert error_of(lambda _: take(tmp_path)) == f"train.py: error: {said}"
