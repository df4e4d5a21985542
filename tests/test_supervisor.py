"""Child processes: each ends when it is no longer wanted, with what it started, and the reason is kept."""

import os
import signal
import subprocess

from processes import assert_gone, is_running

from epo_trl.envs.supervisor import ChildProcess


def start(script, clean_up=lambda: None):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return ChildProcess("the shell", ["sh", "-c", script], lambda: None, clean_up, **pipes)


def test_it_is_killed_when_nobody_refers_to_it_and_cleaned_up_once():
    cleaned = []
    child = start("sleep 100", lambda: cleaned.append(1))
    pid = child.pid
    assert child.is_alive and child.exit_status() is None and is_running(pid)
    del child
    assert not is_running(pid) and cleaned == [1]


def test_the_first_reason_stays():
    child = start("sleep 100")
    assert child.end == "" and not child.hung
    child.close_hung(1.5)
    child.close()
    assert child.end.startswith(f"the shell (process {child.pid}) hung: no answer within 1.5 s; it was killed")
    assert child.hung and not child.is_alive and child.exit_status() == -signal.SIGKILL


def test_an_exit_status_and_the_last_words_are_told():
    child = start("exit 7")
    assert child.exit_status(10.0) == 7 and not child.is_alive
    child.close_dead("Out of luck")
    assert child.end.endswith("died with exit status 7; a reset starts another. Out of luck")


def test_what_it_left_behind_is_killed_when_its_end_is_noticed():
    child = start("sleep 100 & echo $!")
    left = int(child.stdout.readline())
    assert child.exit_status(10.0) == 0
    assert_gone([left])


def test_a_forked_child_of_ours_neither_kills_it_nor_what_it_started():
    child = start("sleep 100 & echo $!; wait")
    started = int(child.stdout.readline())
    fork = os.fork()
    if fork == 0:
        child.exit_status()
        child.close()
        os._exit(0)
    os.waitpid(fork, 0)
    assert child.is_alive and is_running(started)
    child.close()
    assert_gone([started])
