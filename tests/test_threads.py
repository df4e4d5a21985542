"""Threads of a CPU run sleep while they wait, in any order of imports, unless the user says otherwise."""

from epo_trl.threads import SETTINGS

import json
import os
import subprocess
import sys

import pytest
import torch

from epo_trl import threads


def run(script, **env):
    environ = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    words = [sys.executable, "-c", script]
    return subprocess.run(words, env=environ | env, capture_output=True, text=True, check=True)


def test_waiting_threads_sleep_unless_the_user_says_how_they_wait():
    show = "import epo_trl, os; print(os.environ.get('OMP_WAIT_POLICY'))"
    assert run(show).stdout == "passive\n"
    assert {name: run(show, **{name: "of the user"}).stdout for name in SETTINGS} == {
        name: "of the user\n" if name == "OMP_WAIT_POLICY" else "None\n" for name in SETTINGS
    }


@pytest.mark.skipif(sys.platform != "linux", reason="asks torch's GNU runtime")
def test_torch_s_runtime_takes_the_setting():
    """The runtime prints what it has read when it is loaded."""
    script = "import epo_trl, torch; torch.ones(1)"
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in run(script, OMP_DISPLAY_ENV="true").stderr


# The second thread of torch waits 30 times for 20 ms; CPU seconds of both threads, and their number.
WAITS = """
import json, time
values = torch.zeros(2**18).add_(1)
start = time.process_time()
for _ in range(30):
    values.add_(1)
    time.sleep(0.02)
print(json.dumps([time.process_time() - start, torch.get_num_threads()]))
"""


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="threads spin only if each has a CPU")
def test_threads_of_a_torch_that_was_imported_first_sleep_too():
    (spins, _), (first, count), (late, same) = (
        json.loads(run(imports + WAITS, OMP_NUM_THREADS="2").stdout)
        for imports in ("import torch", "import epo_trl, torch", "import torch, epo_trl")
    )
    assert count == same == 2
    assert max(first, late) < spins / 4


def test_another_runtime_than_gnu_s_gets_a_warning(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(threads.Path, "read_text", lambda path: "/lib/libomp.so")
    with pytest.warns(UserWarning, match="Import epo_trl first"):
        threads.outnumber_cpus()
