"""Programs side by side: their order, their failures, and that none outlives the one who started it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from epo_trl.study.job_pool import Job, run_jobs

ROOT = Path(__file__).parents[1]


@pytest.fixture
def job(tmp_path):
    def make(name, program, after=None):
        return Job(name, [sys.executable, "-c", program], tmp_path / name / "log.txt", dict(os.environ), after)

    return make


def run(jobs, at_a_time=2, on_end=lambda job: ""):
    started, most = [], []
    done = run_jobs(
        jobs,
        at_a_time,
        lambda job: started.append(job.name),
        on_end,
        lambda now: most.append(len(now.running)),
        poll_seconds=0.01,
    )
    return done, started, max(most)


def test_jobs_run_side_by_side_in_order_and_after_what_they_need(job):
    wait = "import time; time.sleep(0.3)"
    jobs = [job("a", wait), job("b", "", after="a"), job("c", wait), job("d", "", after="not in the list")]
    done, started, most = run(jobs)
    assert started[:2] == ["a", "c"] and sorted(started[2:]) == ["b", "d"] and most == 2
    assert set(done.succeeded) == set("abcd") and not done.failed and not done.running
    assert 0.3 <= done.succeeded["a"] < 30
    _, started, most = run(jobs, at_a_time=1)
    assert started == list("abcd") and most == 1


def test_a_failure_stops_only_what_needs_it_and_says_where_its_log_is(job, tmp_path):
    fails = "import sys; print('so far'); sys.exit('it is broken')"
    jobs = [job("a", fails), job("b", "", after="a"), job("c", "import os; os.kill(os.getpid(), 9)"), job("d", "")]
    done, started, _ = run(jobs, on_end=lambda job: "nothing was written" if job.name == "d" else "")
    assert started == ["a", "c", "d"]
    assert done.failed == {
        "a": f"exit code 1: it is broken, see {tmp_path}/a/log.txt", "b": "a has failed",
        "c": f"exit code 137, see {tmp_path}/c/log.txt", "d": f"nothing was written, see {tmp_path}/d/log.txt",
    }  # fmt: skip
    assert (tmp_path / "a" / "log.txt").read_text() == "so far\nit is broken\n"


STARTER = """
import signal, sys
from pathlib import Path
from epo_trl.study.job_pool import Job, run_jobs
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in the background inherit that it is ignored
job = Job("a", [sys.executable, "-c", sys.argv[1]], Path(sys.argv[2]), {}, None)
try:
    run_jobs([job], 1, lambda job: None, lambda job: "", lambda now: None)
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
