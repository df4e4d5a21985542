"""Gold paths: the engine's own solutions, generated once and cached on disk.

The engine generates them with full knowledge of the world, hidden objects among it.
Most need about a second, those of the genetics, paint and conductivity tasks many.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from epo_trl.bounds import Share, option
from epo_trl.envs.base import EnvError
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
    teleport_rate: Share = option(
        0.0,
        "Share of the expert's walks between rooms that one 'teleport to' replaces. Must be 0 where the "
        "simplifications have no teleportAction ('easy' has it).",
    )


@dataclass(frozen=True, slots=True)
class GoldPath:
    """A solution of a task.

    `turns` is the number of turns after which a trial solved the task, often before the end; 0 if it did not.
    """

    actions: tuple[str, ...] = ()
    turns: int = 0


class GoldPaths:
    """The gold paths of one simplification, in a folder, by default `cache_folder()`."""

    def __init__(self, simplification: str, folder: str | None = None, java: str | None = None) -> None:
        self._simplification, self._java = simplification, java
        self._folder = Path(os.path.expanduser(folder or cache_folder())) / (simplification or "none")
        self._known: dict[Task, GoldPath] = {}

    def path(self, task_type: str, variation: int) -> GoldPath:
        """Returns the path that solves a task, generating it if it is missing; no actions if the engine found none."""
        self.generate([(task_type, variation)])
        return self._known[task_type, variation]

    def generate(self, tasks: Iterable[Task]) -> None:
        """Generates the missing paths, with a progress bar if there are several.

        Raises:
            EnvError: If no JVM can be started.
        """
        missing = [task for task in dict.fromkeys(tasks) if not self._read(task)]
        if not missing:
            return
        from tqdm.auto import tqdm

        jvm = Jvm(HEAP_MB, self._java, _TIMEOUT_SECONDS)
        try:
            for task in tqdm(missing, desc="gold paths", unit="task", disable=len(missing) == 1):
                if not jvm.is_alive:
                    jvm = Jvm(HEAP_MB, self._java, _TIMEOUT_SECONDS)
                self._known[task] = self._find(jvm, task)
        finally:
            jvm.close()

    def _find(self, jvm: Jvm, task: Task) -> GoldPath:
        try:
            world = World(jvm)
            world.load(*task, self._simplification, gold_path=True)
            actions = world.gold_path()
            seen, turns = world.load(*task, self._simplification), 0
            for action in actions:
                seen, turns = world.step(action), turns + 1
                if seen.completed:
                    break
            path = GoldPath(actions, turns if seen.completed and seen.score == 100 else 0)
            world.release()
        except EnvError as error:
            logger.warning("no gold path for %s: %s", task, error)
            return GoldPath()
        file = self._file(task)
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}.tmp")  # other processes may write and read the same path
        partial.write_text(json.dumps({"turns": path.turns, "actions": path.actions}), encoding="utf-8")
        partial.replace(file)
        return path

    def _file(self, task: Task) -> Path:
        return self._folder / task[0] / f"{task[1]}.json"

    def _read(self, task: Task) -> bool:
        """Whether the path is known, in memory or on disk."""
        if task not in self._known and self._file(task).is_file():
            content = json.loads(self._file(task).read_text(encoding="utf-8"))
            self._known[task] = GoldPath(tuple(content["actions"]), content["turns"])
        return task in self._known
