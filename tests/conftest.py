"""What holds for the whole suite."""

import functools
import gc
import importlib.metadata
import os
import sys
from types import SimpleNamespace

import datasets
import fast_java
import pytest
from hypothesis import HealthCheck, settings

from epo_trl.cli import main
from epo_trl.cli.program import run_recipe

# On a machine that is busy, the first example may take seconds.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
# accelerate parses the metadata of installed packages whenever a model is prepared, and TRL whenever it writes a card.
importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)
os.environ[fast_java.VARIABLE] = fast_java.QUICK
importlib.metadata.version = functools.cache(importlib.metadata.version)
# Each trainer makes three lists of tasks, and datasets would hash them for caches that none of them has.
datasets.arrow_dataset.generate_fingerprint = lambda _: datasets.fingerprint.generate_random_fingerprint()


def pytest_collection_modifyitems(config, items):
    """Deals the files with long tests to the first two workers, which begin with them and end with short tests.

    `--dist worksteal` cuts the list of tests into equal parts. In alphabetical order a long test may be the last one,
    and the other worker then waits for it.
    """
    if hasattr(config, "workerinput"):
        files = {}
        for item in items:
            files.setdefault(item.path, []).append(item)
        order = sorted(
            files.values(),
            key=lambda tests: not any(test.get_closest_marker(name) for test in tests for name in ("slow", "games")),
        )
        items[:] = [test for worker in (0, 1) for tests in order[worker::2] for test in tests]


def pytest_collection_finish(session):
    """Takes all that the imports made out of sight of the garbage collector: a million objects of torch and TRL.

    At the beginning of each training accelerate has it go through all others too, for the memory of a GPU. That is a
    tenth of a training of a few steps; Python collects garbage anyway.
    """
    gc.collect()
    gc.freeze()
    if "accelerate.utils.memory" in sys.modules:
        sys.modules["accelerate.utils.memory"].gc = SimpleNamespace(collect=lambda: 0)


@pytest.fixture(scope="module", autouse=True)
def frozen_imports():
    """Does the same for what the tests of a module imported."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def cached_java(request, tmp_path_factory):
    """In the whole suite many JVMs start: the cache takes as long as three of them."""
    played = [item for item in request.session.items if item.module is request.module and "games" in item.keywords]
    if played and "scienceworld" in request.module.__name__ and "PYTEST_XDIST_WORKER" in os.environ:
        fast_java.use_the_cache(tmp_path_factory.getbasetemp().parent)
    yield
    os.environ[fast_java.VARIABLE] = fast_java.QUICK  # another engine would find classes of ScienceWorld in the cache


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
        assert run_recipe("train", "train.py", ["--environment", "trap"], main) == 1
        return capsys.readouterr().err.strip().splitlines()[-1]

    return run
