"""Python programs in a fork of this process: files, signals and exit code of their own, but no seconds of imports."""

import contextlib
import logging
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState

ROOT = Path(__file__).parents[1]


def run(words: Sequence[Any], *, cwd: Path, log: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs `python WORDS...` to its end, and returns what it printed, to both streams."""
    process = start(words, cwd=cwd, log=log, **env)
    try:
        return subprocess.CompletedProcess(words, process.wait(), log.read_text())
    finally:
        process.kill()


class Fork:
    """A running child, with what the tests use of `subprocess.Popen`."""

    stdin = stdout = stderr = None

    def __init__(self, pid: int) -> None:
        self.pid, self._code = pid, None

    @property
    def returncode(self) -> int | None:
        return self._code

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self, seconds: float | None = None) -> int:
        end = time.monotonic() + (600 if seconds is None else seconds)
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), end)
            time.sleep(0.01)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)


def start_server(words: Sequence[Any], env: Mapping[str, str]) -> Fork:
    """Starts an OpenEnv server, for `running_server`; it writes where the tests do."""
    import openenv.core.env_server  # noqa: F401 - takes seconds: here it is imported for all servers

    return start(words, cwd=Path.cwd(), log=None, **env)


def start(words: Sequence[Any], *, cwd: Path, log: Path | None, **env: str) -> Fork:
    """Starts `python WORDS...`, a script or `-m MODULE`, in a process group of its own."""
    if log:
        log.write_bytes(b"")
    pid = os.fork()
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.setpgid(pid, pid)
    if pid:
        return Fork(pid)
    code = 1
    try:
        _forget_the_tests(cwd, log, env)
        module, first, *rest = [words[0] == "-m", *map(str, words[words[0] == "-m" :])]
        sys.argv = [first, *rest]
        if module:
            runpy.run_module(first, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(first).resolve().parent))
            runpy.run_path(first, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        traceback.print_exc()
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _forget_the_tests(cwd: Path, log: Path | None, env: Mapping[str, str]) -> None:
    """Puts the child where a program begins: its output, its folder, and nothing that tests have set or loaded."""
    if log:
        output = os.open(log, os.O_WRONLY | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(output, stream)
    sys.stdout, sys.stderr = (open(stream, "w", closefd=False) for stream in (1, 2))
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        signal.signal(number, handler)
    logging.getLogger().handlers.clear()
    warnings.resetwarnings()
    torch.set_num_threads(1)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name, module in list(sys.modules.items()):
        if str(ROOT / "recipes") in str(getattr(module, "__file__", "")):
            del sys.modules[name]
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "PYTEST_"))]:
        del os.environ[name]
    os.environ.update(env)
    os.chdir(cwd)
    paths = env.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [*filter(None, paths), *(path for path in sys.path if path != str(ROOT / "tests"))]
