"""State that the engine keeps once per JVM although every world needs its own.

These are all mutable fields of its Scala objects; a test lists them from the jar.

`scala.util.Random`: a world seeds it before each input; loading a task seeds it too.

`util.UniqueIdentifier.count`, the last id given: each world has its own, which is restored when its turn comes. Every
load resets it to 0. With another world's count, an object that a world creates later (a puddle, a seedling) could get
the id of an existing object, and one of the two would be lost.

`SimplifierProcessor.simplifications`: each world has its own. Every load replaces them, and "easy" has another meaning
for circuit tasks than for the rest.

`PathFinder.precomputedExhaustivePaths`, random paths through the house: cleared before each gold path, which would
otherwise depend on the earlier ones.

`util.UniqueTypeID`, a number for each class in the order of first use: no call that is made here exposes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class WorldState:
    """The shared state that belongs to one world, saved while another plays."""

    last_id: int = 0  # that was given in this world
    simplifications: str = ""


class SharedState:
    """The shared state of one JVM, handed from world to world. Use it only within `Jvm.calls`."""

    def __init__(self, gateway: Any) -> None:
        java = gateway.jvm
        self._detach = gateway.detach
        self._random = _scala_object(java.scala.util, "Random")
        self._ids = _scala_object(java.util, "UniqueIdentifier")
        self._simplifier = _scala_object(java.main.scala.scienceworld.runtime, "SimplifierProcessor")
        self._ways = _scala_object(java.scienceworld.goldagent, "PathFinder").precomputedExhaustivePaths()
        self._in_force: str | None = None  # the active simplifications, if known
        # The owner of the state. Not the `World`, which refers to its JVM: a cycle would keep both alive.
        self._owner: WorldState | None = None

    def seed(self, seed: int) -> None:
        """Seeds the random generator."""
        self._random.setSeed(seed)

    def take(self, own: WorldState) -> None:
        """Restores the state of one world. Makes two calls if another world has played since, and none otherwise."""
        if self._owner is own:
            return
        self.leave()
        getattr(self._ids, "count_$eq")(own.last_id)
        if self._in_force != own.simplifications:
            self._detach(self._simplifier.parseSimplificationStr(own.simplifications))
            self._in_force = own.simplifications
        self._owner = own

    def leave(self) -> None:
        """Saves the state of its owner; afterwards the state belongs to no world."""
        if self._owner is not None:
            self._owner.last_id = self._ids.count()
            self._owner = None

    def before_load(self) -> None:
        """Prepares for a load, which replaces the state even if it fails."""
        self.leave()
        self._in_force = None
        self._ways.clear()

    def after_load(self, own: WorldState) -> None:
        """Assigns the state to the world that was loaded."""
        own.simplifications = self._in_force = self._simplifier.getSimplificationsUsed()
        self._owner = own


def _scala_object(package: Any, name: str) -> Any:
    """Returns the singleton instance of a Scala object."""
    return getattr(getattr(package, name + "$"), "MODULE$")
