"""Progress of a study and the remaining time."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

from rich.console import Console
from rich.live import Live
from rich.text import Text

from epo_trl.study.job_pool import Progress, read_tail
from epo_trl.study.run_plan import StudyRun

SECONDS_BETWEEN = {True: 1.0, False: 60.0}  # on a terminal, in a file


class Watch:
    """Shows the progress of a study: on a terminal in lines below the messages, elsewhere once a minute.

    Args:
        runs: All runs to start, including warm starts.
        already: Number of runs that had ended before.
        at_a_time: Number of parallel runs.
        console: Output console; stderr by default.
    """

    def __init__(self, runs: Sequence[StudyRun], already: int, at_a_time: int, console: Console | None = None):
        self._runs = {run.name: run for run in runs}
        self._already, self._at_a_time = already, at_a_time
        self.console = console or Console(file=sys.stderr, highlight=False)
        self._live = Live(console=self.console, auto_refresh=False, transient=True)
        self._shown = time.monotonic()

    def __enter__(self) -> Watch:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        """Prints a permanent line."""
        self.console.print(Text(text), soft_wrap=True)

    def show(self, progress: Progress) -> None:
        """Shows the progress of the runs, if an update is due."""
        now = time.monotonic()
        if now - self._shown < SECONDS_BETWEEN[self.console.is_terminal]:
            return
        self._shown = now
        lines = self.lines(progress, now)
        if self.console.is_terminal:
            self._live.update(Text("\n".join(lines), no_wrap=True), refresh=True)
        else:
            self.say("; ".join(line.strip() for line in lines))

    def lines(self, progress: Progress, now: float) -> list[str]:
        """Formats one line about all runs, and one about each running one."""
        shares = {name: self._share(name) for name in progress.running}
        waiting = len(self._runs) - len(progress.running) - len(progress.succeeded) - len(progress.failed)
        failed = f", {len(progress.failed)} failed" if progress.failed else ""
        left = time_left(self._runs, progress, shares, self._at_a_time, now)
        done = self._already + len(progress.succeeded)
        head = f"{done} done{failed}, {len(progress.running)} running, {waiting} waiting" + (
            "" if left is None else f", about {clock(left)} left"
        )
        each = [
            f"  {name}: {clock(now - start)}" + (f", {100 * shares[name]:.0f} %" if shares[name] else "")
            for name, start in progress.running.items()
        ]
        return [head, *each]

    def _share(self, name: str) -> float:
        run = self._runs[name]
        return share_done(run.folder / LOG, run.optimizer_steps)


LOG = "log.txt"  # in the folder of a run


def share_done(log: Path, steps: int) -> float:
    """Returns the share of a run's steps that are done, by the progress bar in its log; 0.0 if there is none."""
    if not steps or not log.is_file():
        return 0.0
    found = re.findall(rf"\b(\d+)/{steps} \[", read_tail(log))
    return int(found[-1]) / steps if found else 0.0


def time_left(
    runs: Mapping[str, StudyRun], progress: Progress, shares: Mapping[str, float], at_a_time: int, now: float
) -> float | None:
    """Estimates the seconds until all runs have ended; `None` as long as nothing is known.

    A run is expected to last as long as finished runs of its arm, or else as any finished run. A run that has made a
    tenth of its steps is extrapolated.
    """
    taken: dict[str | None, list[float]] = {}
    for name, seconds in progress.succeeded.items():
        taken.setdefault(runs[name].arm, []).append(seconds)
    own = {
        name: (now - start) / shares[name] for name, start in progress.running.items() if shares.get(name, 0.0) >= 0.1
    }
    for name, seconds in own.items():
        taken.setdefault(runs[name].arm, []).append(seconds)
    trained = [seconds for arm, each in taken.items() if arm is not None for seconds in each]

    def expected(name: str) -> float | None:
        arm = runs[name].arm
        known = taken.get(arm) or (trained if arm is not None else [])
        return own.get(name) or (mean(known) if known else None)

    rest = []
    for name in runs:
        if name not in progress.succeeded and name not in progress.failed:
            whole = expected(name)
            if whole is None:
                return None
            rest.append(max(0.0, whole - (now - progress.running.get(name, now))))
    return max(sum(rest) / at_a_time, max(rest, default=0.0))


def clock(seconds: float) -> str:
    """Formats seconds, for example as `1:02:03` or `2:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
