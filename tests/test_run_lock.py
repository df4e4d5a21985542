"""One run to a folder: the lock names who holds it, goes with its process, and is there once for all ranks."""

import os
import signal
import time
from types import SimpleNamespace

import pytest
from filelock import FileLock, Timeout
from trainer_kit import make_trainer

from epo_trl.errors import FileError
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
    with pytest.raises(RunningError, match=rf"output_dir: {tmp_path} is in use by process {other} on .* since 20\d\d-"):
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
        assert f"process {os.getpid()} on" in (tmp_path / LOCK).read_text()


def test_blocks_of_one_process_lie_within_each_other(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(KeyError), run_lock(args_of(tmp_path)):
        with run_lock(args_of(tmp_path / "link")):
            pass
        with pytest.raises(Timeout):
            FileLock(tmp_path / LOCK, blocking=False).acquire()
        raise KeyError
    assert not (tmp_path / LOCK).exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / LOCK).mkdir()
    with pytest.raises(FileError, match=f"output_dir: expected a writable folder, got {tmp_path} "):
        take(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match="output_dir: expected a folder that can be created, got .*file/run "):
        take(tmp_path / "file" / "run")
