"""What the engine keeps once for a whole JVM although every world needs its own.

These are all the fields of its Scala objects that can change; a test lists them from the jar.

`scala.util.Random`: a world seeds it before each input; a load does so itself.

`util.UniqueIdentifier.count`, the last id given: each world has its own, which is put back when its turn comes. Every
load sets it to 0, and with another's, what a world makes later (a puddle, a seedling) would get the id of a thing that
exists, and one of the two would be lost.

`SimplifierProcessor.simplifications`: each world has its own. Every load replaces them, and "easy" means others for
circuit tasks than for the rest.

`PathFinder.precomputedExhaustivePaths`, ways through the house that were once drawn at random: forgotten before each
gold path, which would else depend on those before it.

`util.UniqueTypeID`, a number for each class in the order in which they were met: nothing that we ask for shows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Own:
    """The share of one world, while another plays.

    Args:
        last_id: The last id that was given in it.
        simplifications: The labels of its simplifications.
    """

    last_id: int = 0
    simplifications: str = ""


class SharedState:
    """The shared state of one JVM, handed from world to world. Used within `Jvm.calls` only.

    Args:
        gateway: To the JVM.
    """

    def __init__(self, gateway: Any) -> None:
        java = gateway.jvm
        self._detach = gateway.detach
        self._random = _scala_object(java.scala.util, "Random")
        self._ids = _scala_object(java.util, "UniqueIdentifier")
        self._simplifier = _scala_object(java.main.scala.scienceworld.runtime, "SimplifierProcessor")
        self._ways = _scala_object(java.scienceworld.goldagent, "PathFinder").precomputedExhaustivePaths()
        self._in_force: str | None = None  # the simplifications, if they are known
        # Whose state it is. Not the `World`, which knows its JVM: a circle would keep both alive.
        self._owner: Own | None = None

    def seed(self, seed: int) -> None:
        """Seeds the random generator."""
        self._random.setSeed(seed)

    def take(self, own: Own) -> None:
        """Makes the state that of one world. Two calls if another has played since, none otherwise."""
        if self._owner is own:
            return
        self.leave()
        getattr(self._ids, "count_$eq")(own.last_id)
        if self._in_force != own.simplifications:
            self._detach(self._simplifier.parseSimplificationStr(own.simplifications))
            self._in_force = own.simplifications
        self._owner = own

    def leave(self) -> None:
        """Puts by what its owner needs; the state is nobody's then."""
        if self._owner is not None:
            self._owner.last_id = self._ids.count()
            self._owner = None

    def before_load(self) -> None:
        """Prepares for a load, which replaces the state, also if it fails."""
        self.leave()
        self._in_force = None
        self._ways.clear()

    def after_load(self, own: Own) -> None:
        """Gives the state to the world that was loaded."""
        own.simplifications = self._in_force = self._simplifier.getSimplificationsUsed()
        self._owner = own


def _scala_object(package: Any, name: str) -> Any:
    """Returns the one instance of a Scala object."""
    return getattr(getattr(package, name + "$"), "MODULE$")
