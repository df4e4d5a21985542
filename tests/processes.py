"""Whether processes run, and how soon they end."""

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
