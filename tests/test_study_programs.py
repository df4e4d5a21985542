"""Programs side by side: their order, their failures, and that none outlives the one who started it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from epo_trl.study.programs import Programs

ROOT = Path(__file__).parents[1]


WAIT = "import time; time.sleep(0.3)"


@pytest.fixture
def run(tmp_path):
    """Returns a function that runs Python programs, given by name, and returns their results in the order they end."""

    def run(at_a_time, **sources):
        programs = Programs(lambda: None)
        work = lambda name: programs.run([sys.executable, "-c", sources[name]], tmp_path / name, os.environ)  # noqa: E731
        return dict(programs.map(work, list(sources), at_a_time))

    return run


def test_programs_run_at_the_same_time_but_no_more_than_asked(run):
    assert list(run(2, a=WAIT, b="")) == ["b", "a"]
    assert list(run(1, a=WAIT, b="")) == ["a", "b"]


def test_a_failure_has_its_exit_code_and_the_last_line_of_its_log(run, tmp_path):
    fails = "import sys; print('so far'); sys.exit('it is broken')"
    found = run(2, a=fails, b="import os; os.kill(os.getpid(), 9)", c="print('fine')")
    assert found == {"a": "exit code 1: it is broken", "b": "exit code 137", "c": ""}
    assert (tmp_path / "a").read_text() == "so far\nit is broken\n"


STARTER = """
import signal, sys
from pathlib import Path
import os
from epo_trl.study.programs import Programs
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in the background inherit that it is ignored
programs = Programs(lambda: None)
work = lambda log: programs.run([sys.executable, "-c", sys.argv[1]], log, os.environ)
try:
    list(programs.map(work, [Path(sys.argv[2])], 1))
except KeyboardInterrupt:
    print("interrupted")
"""
# It and a child of its own say who they are; SIGTERM makes it say so and end.
TALKS = """
import os, signal, sys, time
def end(*_):
    print("saved", flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, end)
if os.fork():
    print("ready", flush=True)
else:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
print(os.getpid(), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_program_outlives_its_starter(how, tmp_path):
    log = tmp_path / "log.txt"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, TALKS, str(log)], env=environment, stdout=subprocess.PIPE, text=True
    )
    until(lambda: log.is_file() and len(log.read_text().split()) == 3, "the program has not started")
    children = [int(word) for word in log.read_text().split() if word.isdigit()]
    assert len(children) == 2 and all(map(alive, children))
    starter.send_signal(how)
    said = starter.communicate(timeout=30)[0]
    until(lambda: not any(map(alive, children)), "somebody is left")
    assert ("saved" in log.read_text()) == (how != signal.SIGKILL) == (said == "interrupted\n")


def until(condition, otherwise, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, otherwise
        time.sleep(0.02)


def alive(process):
    stat = Path(f"/proc/{process}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
