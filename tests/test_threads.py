"""Threads of a CPU run sleep while they wait, unless the user says otherwise."""

from epo_trl.threads import SETTINGS, sleep_while_waiting

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.py"))
PASSIVE = {"OMP_WAIT_POLICY": "passive"}


def test_waiting_threads_sleep_unless_the_user_says_how_they_wait():
    environ = {"PATH": "/bin", "OMP_NUM_THREADS": "3"}
    sleep_while_waiting(environ)
    assert environ == {"PATH": "/bin", "OMP_NUM_THREADS": "3", **PASSIVE}
    for name in SETTINGS:
        environ = {name: "of the user"}
        sleep_while_waiting(environ)
        assert environ == {name: "of the user"}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_settles_that_before_it_imports_anything(path):
    imports = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert ast.unparse(imports[0]) == "import epo_trl.threads"


@pytest.mark.skipif(sys.platform != "linux", reason="asks torch's GNU runtime")
def test_torch_s_runtime_takes_the_setting():
    """The runtime prints what it has read when it is loaded."""
    script = "import epo_trl.threads, torch; torch.ones(1)"
    environ = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**environ, "OMP_DISPLAY_ENV": "true"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in done.stderr
