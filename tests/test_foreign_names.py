"""Every private name of another library that the code uses is in the table of CONTRIBUTING.md, with one home."""

import argparse
import ast
import functools
import importlib
import inspect
import re
from pathlib import Path

import pytest
from foreign_names import HEADING, ROOT, TABLE

from epo_trl.trainers import EPOPPOTrainer

PACKAGE = ROOT / "epo_trl"
FILES = [path for folder in ("epo_trl", "recipes", "tests/with_vllm") for path in sorted((ROOT / folder).rglob("*.py"))]
CONTRACTS = ("test_trl_contract.py", "test_library_contract.py")
DOCUMENTED = {"_exit", "_asdict"}  # of os, of a named tuple


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_" and name not in DOCUMENTED


def defined(tree: ast.AST) -> set[str]:
    """Returns the names of functions, classes, variables and attributes that some code makes."""
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    variables = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return functions | variables | {n.attr for n in own_attributes(tree) if isinstance(n.ctx, ast.Store)}


def own_attributes(tree: ast.AST) -> set[ast.Attribute]:
    """Returns the attributes of `self`, `cls` and `super()`."""
    return {node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_own(node.value)}


def is_own(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id == "super"
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def touched(tree: ast.AST) -> set[str]:
    """Returns the names that some code reaches for in other objects and modules."""
    own, names = own_attributes(tree), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node not in own:
            names.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            names |= {*(alias.name for alias in node.names), *(node.module or "").split(".")}
        elif isinstance(node, ast.Import):
            names |= {part for alias in node.names for part in alias.name.split(".")}
        elif isinstance(node, ast.Call):
            names |= {keyword.arg for keyword in node.keywords if keyword.arg}
            if ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "delattr") and len(node.args) > 1:
                names.add(str(getattr(node.args[1], "value", "")))
    return names


def inherited(kind: type) -> set[str]:
    """Returns what the bases of a class that are not ours define or set."""
    lineage = EPOPPOTrainer.__mro__ if kind in EPOPPOTrainer.__mro__ else kind.__mro__  # a mixin's is the trainer's
    foreign = (base for base in lineage if base.__module__.split(".")[0] not in ("epo_trl", "builtins", __name__))
    return set().union(*map(made_by, foreign))


@functools.cache
def made_by(kind: type) -> set[str]:
    try:
        return {*vars(kind), *re.findall(r"\bself\.(_\w+)", inspect.getsource(kind))}
    except (OSError, TypeError):  # without source
        return {*vars(kind)}


def foreign_names(tree: ast.Module, classes: dict[str, type]) -> set[str]:
    """Returns the private names of other libraries, or of other files, that a file uses or overrides."""
    names = touched(tree) - defined(tree)
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name in classes:
            own = defined(node) | {attribute.attr for attribute in own_attributes(node)}
            names |= own & inherited(classes[node.name])
    return set(filter(is_private, names))


def classes_of(path: Path) -> dict[str, type]:
    if not path.is_relative_to(PACKAGE):
        return {}
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
    return {name: value for name, value in vars(module).items() if inspect.isclass(value)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_uses_no_private_name_of_another_library_that_is_not_in_the_table(path):
    place = str(path.relative_to(ROOT))
    for name in foreign_names(ast.parse(path.read_text()), classes_of(path)):
        row = TABLE.get(name)
        if place.startswith("tests/") and row is not None:  # a test may look at what the code uses
            continue
        assert row is not None, (
            f"{place} uses {name}, which is not its own. If it is another library's: take a public name, or give it a "
            f"row in CONTRIBUTING.md ('{HEADING.strip('# ')}') and a test in one of {CONTRACTS}. If it is another "
            "file's of ours: make it public. If it is meant to be new: a base class has the same name, take another."
        )
        assert place in row.homes, (
            f"{place} uses {name}, whose home is {', '.join(row.homes)} (CONTRIBUTING.md): add what is needed there"
        )


@pytest.mark.parametrize("row", TABLE.values(), ids=lambda row: row.name)
def test_a_row_of_the_table_is_true(row):
    assert row.library and row.homes and row.used, f"CONTRIBUTING.md: the row of {row.name} has an empty cell"
    for home in row.homes:
        source = (ROOT / home).read_text()
        assert re.search(rf"\b{row.name}\b", source), (
            f"CONTRIBUTING.md: {home} no longer uses {row.name}; take it out of the table, and out of the tests"
        )
        assert len(row.homes) == 1 or row.name in defined(ast.parse(source)), (
            f"CONTRIBUTING.md: {row.name} has the homes {row.homes}, and {home} does not override it; takes one home"
        )
    tests = [file for file in CONTRACTS if re.search(rf"\b{row.name}\b", (ROOT / "tests" / file).read_text())]
    assert tests, f"{row.name} is in no test of {CONTRACTS}: add one that fails when the name moves"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("trainer._secret = 3", {"_secret"}),
        ("getattr(trainer, '_secret', None)", {"_secret"}),
        ("save(_secret=True)", {"_secret"}),
        ("from torch._secret import x", {"_secret"}),
        ("from torch import _secret", {"_secret"}),
        ("def _own(x):\n    return x._own", set()),
        ("class Parser(argparse.ArgumentParser):\n    def _get_formatter(self): pass", {"_get_formatter"}),
        ("class Parser(argparse.ArgumentParser):\n    def f(self):\n        self._actions = 1", {"_actions"}),
        ("class Parser(argparse.ArgumentParser):\n    def f(self):\n        self._own = 1", set()),
    ],
)
def test_a_use_is_found(source, found):
    class Parser(argparse.ArgumentParser):
        pass

    assert foreign_names(ast.parse(source), {"Parser": Parser}) == found
