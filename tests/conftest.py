"""What holds for the whole suite."""

import functools
import gc
import importlib.metadata
import os

import fast_java
import pytest
from hypothesis import HealthCheck, settings

from epo_trl.cli import main
from epo_trl.cli.command_line import Program
from epo_trl.cli.program import run_program

# On a machine that is busy, the first example may take seconds.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
# accelerate parses the metadata of installed packages whenever a model is prepared: a tenth of a short training.
importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)
os.environ[fast_java.VARIABLE] = fast_java.QUICK


def pytest_collection_finish(session):
    """Takes all that the imports made out of sight of the garbage collector.

    accelerate has it go through everything at the beginning of each training: a million objects of torch and TRL, four
    fifths of the time of a test that trains a tiny model for one step.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def frozen_imports():
    """Does the same for what the tests of a module imported."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def cached_java(request, tmp_path_factory):
    """In the whole suite many JVMs start: the cache takes as long as three of them."""
    if "scienceworld" in request.module.__name__ and "PYTEST_XDIST_WORKER" in os.environ:
        fast_java.use_the_cache(tmp_path_factory.getbasetemp().parent)


@pytest.fixture
def command(capsys):
    """Returns a function that calls `epo-trl` and returns `(exit code, stdout, stderr)`."""

    def call(*words):
        try:
            code = main(list(map(str, words)))
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def error_of(capsys):
    """Returns a function that runs the `main` of a recipe, which has to fail, and returns the last line of stderr."""

    def run(main):
        with pytest.raises(SystemExit, match="^1$"):
            run_program(main, Program("train.py", dict, "", "", environment="trap"), ["--seed", "1"])
        return capsys.readouterr().err.strip().splitlines()[-1]

    return run
