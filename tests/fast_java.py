"""JVMs of tests live for seconds: they compile for a quick start, and load ScienceWorld's classes from one file."""

import os

from filelock import FileLock

from epo_trl.envs.scienceworld.jvm import Jvm, heap_mb_for
from epo_trl.envs.scienceworld.world import World

VARIABLE = "JDK_JAVA_OPTIONS"
QUICK = "-XX:+IgnoreUnrecognizedVMOptions -XX:TieredStopAtLevel=1"


def use_the_cache(folder):
    """Makes JVMs that start from now on read a cache, which the first process of pytest that needs it writes.

    An older Java ignores the options and writes none.
    """
    file = folder / "scienceworld.aot"
    with FileLock(f"{file}.lock"):
        if not file.exists():
            _write(file)
    os.environ[VARIABLE] = f"{QUICK} -XX:AOTCache={file}" if file.stat().st_size else QUICK


def _write(file):
    os.environ[VARIABLE] = f"{QUICK} -XX:AOTCacheOutput={file}"
    jvm = Jvm(heap_mb_for(8))
    world = World(jvm)
    world.load("grow-plant", 1, "easy")
    world.valid_actions()
    world.step("wait")
    jvm.process._process.stdin.close()  # it ends by itself, and writes
    jvm.process.exit_status(300.0)
    jvm.close()
    file.touch()
