"""One ScienceWorld world on a shared JVM, with only the calls that a prompt needs."""

from __future__ import annotations

import hashlib
import re
import zlib
from dataclasses import dataclass
from typing import Any

from epo_trl.envs.base import EnvError
from epo_trl.envs.scienceworld.jvm import Jvm
from epo_trl.envs.scienceworld.shared import WorldState

AMBIGUOUS = "Ambiguous request"
_UNKNOWN = ("No known action matches that input", "Unknown action")
_CHOICE = re.compile(r"^(\d+):\t(.*)$", re.MULTILINE)
_SPACES = re.compile(" +")


@dataclass(frozen=True, slots=True)
class Seen:
    """The engine's state after an input."""

    observation: str
    score: int  # from 0 to 100, or -100 after a failure
    completed: bool  # whether the engine counts the task as over
    moves: int  # ticks of the world's clock so far: `wait` costs several, looking none
    objects: tuple[str, ...]  # names of the objects in reach, sorted
    look: str  # what `look around` would give
    inventory: str  # what `inventory` would give

    @property
    def is_known(self) -> bool:
        """Whether the engine understood the input."""
        return not self.observation.startswith(_UNKNOWN)

    @property
    def key(self) -> str:
        """A short text that two states of a task share only if room, inventory, score and open question are equal.

        The whole world would be equal only until the first tick, which moves temperatures and lives on.
        """
        parts = (self.look, self.inventory, self.score, self.completed, sorted(self.choices.items()))
        return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()

    @property
    def choices(self) -> dict[str, str]:
        """Maps the numbers that the engine waits for to their meanings; empty unless the input was ambiguous."""
        return dict(_CHOICE.findall(self.observation)) if self.observation.startswith(AMBIGUOUS) else {}


class World:
    """A world. Part of its state is shared by the whole JVM, so one thread drives all worlds of a JVM.

    Before each operation, a world restores its share of that state (`SharedState`). The same inputs then lead to the
    same texts in every process, whatever other worlds do and whenever they do it.
    """

    def __init__(self, jvm: Jvm) -> None:
        self.jvm, self._own = jvm, WorldState()
        with jvm.calls():
            jvm.shared.leave()  # objects that the interface creates get ids too
            self._server = jvm.java.scienceworld.runtime.pythonapi.PythonInterface()
        self._parts: tuple[Any, ...] = ()  # Java objects of the loaded task

    def load(
        self, task_type: str, variation: int, simplification: str, *, seed: int = 0, gold_path: bool = False
    ) -> Seen:
        """Loads a task and returns its start. Only the variation decides the start; `seed` decides later random events.

        Raises:
            EnvError: If the engine does not have the task or the variation, which it reports only in a string.
        """
        with self.jvm.calls():
            self.jvm.shared.before_load()
            problem = self._server.load(task_type, variation, simplification, gold_path)
            if problem:
                raise EnvError(f"ScienceWorld cannot load variation {variation} of {task_type!r}: {problem}")
            self.jvm.shared.after_load(self._own)
            self.jvm.release(*self._parts)
            holder = self._server.agentInterface()
            self._interface = holder.get()
            self._parser = self._interface.inputParser()
            self._parts = (holder, self._interface, self._parser)
            self.task: str = " ".join(self._server.getTaskDescription().split())
            self.action_templates = self._strings(self._server.getPossibleActions())
        self._seed, self._inputs = seed, 0
        return self.step("look around")

    def step(self, text: str) -> Seen:
        """Sends an input and returns the state after it.

        Raises:
            EnvError: If the engine failed. It reports that as a failure of the agent, with a score of -100.
        """
        with self.jvm.calls():
            self.jvm.shared.take(self._own)
            self.jvm.shared.seed(zlib.crc32(f"{self._seed} {self._inputs}".encode()))
            self._inputs += 1
            observation = self._server.step(text)
            score = round(100 * self._server.getScore())
            if score < 0 and self._interface.isInErrorState():
                raise EnvError(f"ScienceWorld failed at {text!r}: {self._interface.getErrorStateMessage()}")
            return Seen(
                observation=observation.strip(),
                score=score,
                completed=self._server.getCompleted(),
                moves=self._server.getNumMoves(),
                objects=tuple(dict.fromkeys(self._strings(self._server.getPossibleObjects()))),
                look=_SPACES.sub(" ", self._server.freeActionLook().strip()),
                inventory=_SPACES.sub(" ", self._server.freeActionInventory().strip()),
            )

    def cancel(self) -> None:
        """Withdraws an ambiguous input. As a text, any answer but a valid number would be ignored and cost a tick."""
        with self.jvm.calls():
            self._parser.clearAmbiguousState()

    def valid_actions(self) -> tuple[str, ...]:
        """Returns the actions that the engine would accept now, sorted, in 36 to 80 ms."""
        with self.jvm.calls():
            self.jvm.shared.take(self._own)
            return tuple(sorted(set(self._strings(self._server.getValidActionObjectCombinations()))))

    def gold_path(self) -> tuple[str, ...]:
        """Returns the actions of the gold path, if the task was loaded with one."""
        with self.jvm.calls():
            return self._strings(self._server.getGoldActionSequence())

    def release(self) -> None:
        """Frees the world's memory in the JVM, if the JVM is alive."""
        if self.jvm.is_alive:
            with self.jvm.calls():
                self.jvm.release(self._server, *self._parts)

    def _strings(self, java_list: Any) -> tuple[str, ...]:
        """Converts a Java list of strings in one call."""
        joined = self.jvm.java.java.lang.String.join("\n", java_list)
        self.jvm.release(java_list)
        return tuple(joined.split("\n")) if joined else ()
