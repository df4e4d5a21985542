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

from epo_trl.long_runs.run_lock import LOCK, RunningError, run_lock


def args_of(folder, rank=0):
    return SimpleNamespace(output_dir=str(folder), process_index=rank, world_size=1)


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
    with pytest.raises(RunningError, match=says), run_lock(args_of(tmp_path)):
        pass
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
    says = rf"process 7 on elsewhere since yesterday, which cannot be seen from .*delete {tmp_path / LOCK} and start"
    with pytest.raises(RunningError, match=says), run_lock(args_of(tmp_path)):
        pass
    assert json.loads((tmp_path / LOCK).read_text()) == record
    (tmp_path / LOCK).write_text('{"host": "elsewh')  # it was killed as it wrote this
    with run_lock(args_of(tmp_path)):
        pass


def test_on_a_disk_without_locks_the_process_is_looked_for(tmp_path, other, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(RunningError, match=f"process {other} on"), run_lock(args_of(tmp_path)):
        pass
    record = json.loads((tmp_path / LOCK).read_text())
    (tmp_path / LOCK).write_text(json.dumps({**record, "pid": 2**22 + 1}))  # beyond the largest there can be
    with run_lock(args_of(tmp_path)):
        pass


def test_an_error_in_training_gives_the_folder_back(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=1)

    def fail(*_):
        assert (tmp_path / LOCK).exists()
        raise KeyError("in the first step")

    trainer.training_step = fail
    with pytest.raises(KeyError):
        trainer.train()
    assert not (tmp_path / LOCK).exists()
