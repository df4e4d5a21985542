"""Games in worker processes: what dies or hangs costs its own episodes, is counted, and leaves no process behind."""

import signal
import time
from pathlib import Path

import pytest
from processes import assert_no_helper_outlives, assert_soon, is_running
from rollout_parts import ScriptedPolicy, byte_tokenizer, context_of
from wild_games import WildSuite

from epo_trl.envs import EnvError
from epo_trl.envs.base import Faults
from epo_trl.envs.pool import PooledSuite, WorkerLost
from epo_trl.envs.testing import EnvContract
from epo_trl.envs.toy import ToySuite
from epo_trl.envs.trap import HATCH, TrapSuite, go_through
from epo_trl.rollout import RolloutSettings, play_episodes
from epo_trl.types import StopReason

TESTS = Path(__file__).parent


class TestPooledToy(EnvContract):
    def make_suite(self):
        return PooledSuite(ToySuite(), workers=2)


@pytest.fixture
def pool(tmp_path):
    """Returns a function that makes a pool of wild games."""
    suites = []

    def make(workers=1, step_seconds=60.0, reset_seconds=60.0):
        suites.append(PooledSuite(WildSuite(tmp_path), workers, step_seconds, reset_seconds))
        return suites[-1]

    yield make
    for suite in suites:
        for worker in suite._workers:
            if worker._process is not None:
                worker._process.child.close()


def start(env, task_id="train/0"):
    return env.reset(seed=0, options={"task_id": task_id})


def order(folder, what, times=1, task_id="train/1"):
    (folder / task_id.replace("/", "_")).write_text(f"{what} {times}")


# --- Steps ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "message", "timeouts"), [("die", "died with exit status -9", 0), ("hang", "no answer within 1 s", 1)]
)
def test_a_worker_that_is_lost_in_a_step_loses_its_episodes_and_no_others(pool, action, message, timeouts):
    suite = pool(workers=2, step_seconds=1.0)
    envs = [suite.make_env() for _ in range(4)]
    starts = [start(env) for env in envs]
    pids = [seen["pid"] for _, seen in starts]
    assert pids[0] == pids[2] != pids[1] == pids[3]
    for env, text in zip(envs, (action, "look", "look", "look"), strict=True):
        env.step_async(text)
    for env in (envs[0], envs[2]):
        with pytest.raises(WorkerLost, match=message):
            env.step_wait()
    assert envs[1].step_wait()[0] == envs[3].step_wait()[0]
    assert not is_running(pids[0])
    assert start(envs[0])[0] == starts[0][0]
    with pytest.raises(WorkerLost, match=message):
        envs[2].step("look")  # its game was on the old worker
    assert start(envs[2])[1]["pid"] == start(envs[0])[1]["pid"] not in pids
    assert suite.faults() == Faults(restarts=1, timeouts=timeouts)


@pytest.mark.slow
@pytest.mark.parametrize("action", ["hang", "die"])
def test_an_answer_or_a_loss_is_seen_without_waiting_for_it(pool, action):
    suite = pool(workers=2, step_seconds=3.0)
    lost, fine = suite.make_env(), suite.make_env()
    for env in (lost, fine):
        start(env)
    fine.step_async("slow")
    assert not fine.has_answer()
    lost.step_async(action)
    assert_soon(fine.has_answer, 60)
    assert fine.step_wait()[0] and fine.has_answer()
    assert_soon(lost.has_answer, 60)
    with pytest.raises(WorkerLost):
        lost.step_wait()


@pytest.mark.slow
def test_the_time_of_a_step_starts_when_the_worker_gets_to_it(pool):
    suite = pool(step_seconds=3.0)
    envs = [suite.make_env() for _ in range(3)]
    for env in envs:
        start(env)
    time.sleep(3.5)  # a long generation
    for env in envs:
        env.step_async("slow")  # 1.5 s each, 4.5 s in all
    assert all(env.step_wait()[0] for env in envs)
    assert suite.faults() == Faults()


def test_what_an_environment_raises_is_raised_here_and_costs_nothing_else(pool):
    env = pool().make_env()
    with pytest.raises(EnvError, match=r"task_id: .*got 'train/x'"):
        start(env, "train/x")
    _, seen = start(env)
    with pytest.raises(EnvError, match="KeyError: 'fact'"):
        env.step("raise")
    assert env.step("look")[-1]["pid"] == seen["pid"]


# --- Resets --------------------------------------------------------------------------------------------------------


def test_a_game_in_a_worker_is_reseeded():
    env = PooledSuite(TrapSuite()).make_env()

    def luck():
        env.reseed(3)
        return [start(env) and env.step(go_through(HATCH))[4]["won"] for _ in range(20)]

    first = luck()
    assert luck() == first and 0 < sum(first) < 20
    env.close()


@pytest.mark.slow
@pytest.mark.parametrize("what", ["die", "hang"])
def test_a_reset_is_tried_again_in_a_new_worker(pool, tmp_path, what):
    suite = pool(reset_seconds=3.0)
    envs = [suite.make_env() for _ in range(3)]
    for env in envs:
        start(env)
    order(tmp_path, what)
    for env, task_id in zip(envs, ("train/0", "train/1", "train/0"), strict=True):
        env.reset_async(seed=0, options={"task_id": task_id})
    first, second, third = (env.reset_wait() for env in envs)
    assert first[0] == third[0] != second[0]
    faults = suite.faults()
    assert (faults.restarts, faults.timeouts) == (1, int(what == "hang"))
    assert 1 <= faults.retries <= 2, "the third request may already go to the new worker"
    assert second[1]["pid"] == third[1]["pid"] != first[1]["pid"]


def test_retries_are_bounded(pool, tmp_path):
    suite = pool()
    env, other = suite.make_env(), suite.make_env()
    order(tmp_path, "die", times=100)
    with pytest.raises(WorkerLost, match="died"):
        start(env, "train/1")
    assert (tmp_path / "train_1").read_text() == "die 97"
    assert suite.faults() == Faults(restarts=2, retries=2)
    assert start(other)[0] == start(env)[0]


# --- A rollout -----------------------------------------------------------------------------------------------------


def test_a_rollout_goes_on_without_the_episodes_of_a_lost_worker(pool):
    suite, tokenizer = pool(workers=2), byte_tokenizer()
    envs = [suite.make_env() for _ in range(4)]
    say = "<think> hm </think> <action> {} </action>".format
    rounds = [[say("look")] * 4, [say("look"), say("die"), say("look"), say("look")], [say("look")] * 2]
    settings = RolloutSettings(max_turns=3)

    def play(rounds):
        policy = ScriptedPolicy(tokenizer, rounds)
        return play_episodes(envs, [("train/0", 0)] * 4, policy, context_of(tokenizer), settings)

    episodes = play(rounds)
    assert [e.stop is StopReason.ABORTED for e in episodes] == [False, True, False, True]
    assert "WorkerLost: the environment worker (process " in episodes[3].error
    assert all(e.stop is StopReason.TURN_LIMIT for e in play([]))


# --- Processes that must not stay ----------------------------------------------------------------------------------


def test_the_process_stops_with_the_last_environment(pool):
    suite = pool()
    envs = [suite.make_env() for _ in range(2)]
    pid = {start(env)[1]["pid"] for env in envs}.pop()
    for _ in range(2):
        envs[0].close()
    assert is_running(pid) and envs[1].step("look")
    envs[1].close()
    assert not is_running(pid) and suite.faults() == Faults()
    with pytest.raises(EnvError, match="closed"):
        start(envs[1])


def test_the_process_stops_with_the_suite_if_nothing_was_closed():
    suite = PooledSuite(ToySuite())
    env = suite.make_env()
    start(env)
    pid = suite._workers[0]._process.child.pid
    assert is_running(pid)
    del suite, env
    assert not is_running(pid)


PLAYER = f"""
import os, signal, sys, time
sys.path.insert(0, {str(TESTS)!r})
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in the background inherit that it is ignored
from epo_trl.envs.pool import PooledSuite
from wild_games import WildSuite
suite = PooledSuite(WildSuite("."))
env = suite.make_env()
worker = env.reset(options={{"task_id": "train/0"}})[1]["pid"]
child_of_worker = env.step("fork")[-1]["child"]
child = os.fork()
if child == 0:
    time.sleep(300)
    os._exit(0)
print(worker, child_of_worker, child, flush=True)
env.step_async("hang")
if sys.argv[1] == "crash":
    raise RuntimeError
env.step_wait()
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["crash", signal.SIGKILL])
def test_no_worker_outlives_python_even_if_it_hangs(end):
    assert_no_helper_outlives(PLAYER, end)


# --- Wrong input ---------------------------------------------------------------------------------------------------
