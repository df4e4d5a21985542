"""Gold paths: the engine's own solutions, generated once and cached on disk.

The engine generates them with full knowledge of the world, unlike an expert that sees only what the agent is shown.
Most need a tenth of a second, those of the genetics tasks some seconds.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from epo_trl.bounds import Count, Share, check_bounds, option
from epo_trl.envs.base import EnvError
from epo_trl.envs.scienceworld.host import JvmSettings
from epo_trl.envs.scienceworld.jvm import Jvm
from epo_trl.envs.scienceworld.world import World

HEAP_MB = 2048
_TIMEOUT_SECONDS = 600.0
Task = tuple[str, int]  # task type and variation
logger = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Returns the default cache folder of gold paths: `$EPO_TRL_CACHE`, else `epo_trl` in the user's cache folder."""
    own = os.environ.get("EPO_TRL_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return (Path(own) if own else base / "epo_trl") / "scienceworld_gold"


@dataclass
class GoldSettings:
    """Gold paths, their cache, which processes may share, and the expert that plays them."""

    gold_folder: str | None = option(
        None, "Cache of gold paths; by default $EPO_TRL_CACHE, or epo_trl in the user's cache folder."
    )
    gold_workers: Count = option(1, "Number of Java processes that generate gold paths in parallel, with 2 GB each.")
    teleport_rate: Share = option(
        0.0,
        "Share of the expert's walks between rooms that one 'teleport to' replaces. Must be 0 where the "
        "simplifications have no teleportAction ('easy' has it).",
    )
    guess_rate: Share = option(
        0.0,
        "Share of the demonstrations in which the expert focuses on any object in reach that some training task asks "
        "for. They teach the form of play; `keep_lost` keeps those that lose.",
    )

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True, slots=True)
class GoldPath:
    """A solution of a task.

    Args:
        actions: All actions of the solution.
        turns: Number of turns after which the task was solved in a trial, often before the end. 0 if it was not solved.
    """

    actions: tuple[str, ...] = ()
    turns: int = 0


@dataclass
class GoldPaths:
    """The gold paths of one simplification.

    Args:
        simplification: Simplification as in `EngineRules`.
        settings: Settings of the cache and the generation.
        jvm: Settings of the JVMs that generate them.
    """

    simplification: str
    settings: GoldSettings
    jvm: JvmSettings
    _known: dict[Task, GoldPath] = field(default_factory=dict, repr=False)
    _blocks: int = field(default=0, repr=False)  # open blocks of `kept_jvms`
    _idle: list[Jvm] = field(default_factory=list, repr=False)

    def path(self, task_type: str, variation: int) -> GoldPath:
        """Returns the path that solves a task, generating it if it is missing; no actions if the engine found none.

        Raises:
            EnvError: If no JVM can be started.
        """
        self.generate([(task_type, variation)])
        return self._known[task_type, variation]

    @contextlib.contextmanager
    def kept_jvms(self) -> Iterator[None]:
        """Keeps the JVMs between calls of `generate`, until the end of the block: a new JVM is slow at first."""
        self._blocks += 1
        try:
            yield
        finally:
            self._blocks -= 1
            while self._idle and not self._blocks:
                self._idle.pop().close()

    def generate(self, tasks: Iterable[Task]) -> None:
        """Generates the missing paths, with a progress bar if there are several.

        Raises:
            EnvError: If no JVM can be started.
        """
        missing = [task for task in dict.fromkeys(tasks) if not self._read(task)]
        if not missing:
            return
        from tqdm.auto import tqdm

        self._idle = [jvm for jvm in self._idle if jvm.is_alive]
        bar = tqdm(total=len(missing), desc="gold paths", unit="task", disable=len(missing) == 1)
        with bar, self.kept_jvms(), ThreadPoolExecutor(min(self.settings.gold_workers, len(missing))) as threads:
            futures = {threads.submit(self._generate, task): task for task in missing}
            try:
                for future in as_completed(futures):
                    self._known[futures[future]] = future.result()
                    bar.update()
            finally:  # after an error or Ctrl-C, each thread finishes its current path
                threads.shutdown(cancel_futures=True)

    def _generate(self, task: Task) -> GoldPath:
        try:
            jvm = self._idle.pop()
        except IndexError:
            jvm = Jvm(HEAP_MB, self.jvm.java, _TIMEOUT_SECONDS)
        try:
            return self._find(jvm, task)
        finally:
            if jvm.is_alive:
                self._idle.append(jvm)

    def _find(self, jvm: Jvm, task: Task) -> GoldPath:
        try:
            world = World(jvm)
            world.load(*task, self.simplification, gold_path=True)
            path = self._tried(world, task, world.gold_path())
            world.release()
        except EnvError as error:
            logger.warning("no gold path for %s: %s", task, error)
            return GoldPath()
        try:
            self._write(task, path)
        except OSError as error:  # a full disk or a read-only home: the path is used all the same
            folder = self._file(task).parents[1]
            warnings.warn(f"gold_folder: {folder} cannot be written ({error.strerror}); set another", stacklevel=2)
        return path

    def _tried(self, world: World, task: Task, actions: tuple[str, ...]) -> GoldPath:
        seen = world.load(*task, self.simplification)
        for turn, action in enumerate(actions, 1):
            seen = world.step(action)
            if seen.completed:
                return GoldPath(actions, turn if seen.score == 100 else 0)
        return GoldPath(actions)

    def _file(self, task: Task) -> Path:
        folder = os.path.expanduser(self.settings.gold_folder or cache_folder())
        return Path(folder) / (self.simplification or "none") / task[0] / f"{task[1]}.json"

    def _read(self, task: Task) -> bool:
        """Whether the path is known, in memory or on disk."""
        if task not in self._known:
            # An absent or corrupt file is generated again.
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                content = json.loads(self._file(task).read_text(encoding="utf-8"))
                self._known[task] = GoldPath(tuple(content["actions"]), int(content["turns"]))
        return task in self._known

    def _write(self, task: Task, path: GoldPath) -> None:
        """Writes the file atomically."""
        target = self._file(task)
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, suffix=".tmp")
        try:
            with open(handle, "w", encoding="utf-8") as file:
                json.dump({"turns": path.turns, "actions": path.actions}, file)
            os.replace(name, target)
        except OSError:
            os.unlink(name)
            raise
