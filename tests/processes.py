"""Whether processes run, and how soon they end."""

import os
import signal
import subprocess
import sys
import time


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def assert_soon(holds, seconds=10.0):
    until = time.monotonic() + seconds
    while not holds() and time.monotonic() < until:
        time.sleep(0.05)
    assert holds()


def assert_gone(pids, seconds=10.0):
    assert_soon(lambda: not any(map(is_running, pids)), seconds)


def assert_no_helper_outlives(code, end, **environment):
    """Ends a program that prints the ids of its helpers and of its fork. The fork, which stays, keeps none alive."""
    player = subprocess.Popen(
        [sys.executable, "-c", code, str(end)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **environment},
    )
    *helpers, child = map(int, player.stdout.readline().split())
    try:
        if end != "crash":
            assert is_running(helpers[0]) and os.getpgid(helpers[0]) != os.getpgid(player.pid)
            time.sleep(0.3)
            player.send_signal(end)
        assert player.wait(30) != 0
        assert_gone(helpers)
        assert is_running(child)
    finally:
        player.kill()
        os.kill(child, signal.SIGKILL)
        player.stdout.close()
