"""Threads of a CPU run sleep while they wait, unless the user says otherwise."""

from epo_trl.threads import SETTINGS

import os
import subprocess
import sys

import pytest


def run(script, **env):
    environ = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    words = [sys.executable, "-c", script]
    return subprocess.run(words, env=environ | env, capture_output=True, text=True, check=True)


@pytest.mark.parametrize(("env", "policy"), [({}, "passive"), ({"OMP_WAIT_POLICY": "active"}, "active")])
def test_waiting_threads_sleep_unless_the_user_says_how_they_wait(env, policy):
    assert run("import epo_trl, os; print(os.environ['OMP_WAIT_POLICY'])", **env).stdout.strip() == policy


@pytest.mark.skipif(sys.platform != "linux", reason="asks torch's GNU runtime")
def test_torch_s_runtime_takes_the_setting():
    """The runtime prints what it has read when it is loaded."""
    script = "import epo_trl, torch; torch.ones(1)"
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in run(script, OMP_DISPLAY_ENV="true").stderr
