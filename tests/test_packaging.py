"""The pins fit the requirements, and the package says what it needs."""

import ast
import configparser
import re
import runpy
import sys
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
# What `make` installs.
EXTRAS = ("alfworld", "scienceworld", "webshop", "study", "openenv", "deepspeed", "notebooks", "docs", "dev")


@pytest.fixture(scope="module")
def setup():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


FILES = {"constraints.txt": EXTRAS, "constraints-vllm.txt": ("alfworld", "deepspeed", "vllm")}


def read_pins(name):
    lines = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]
    requirements = [Requirement(line) for line in lines]
    return {canonicalize_name(r.name): next(iter(r.specifier)).version for r in requirements}


def requirements(setup, extras):
    texts = [setup["options"]["install_requires"], *(setup["options.extras_require"][extra] for extra in extras)]
    return [Requirement(line) for text in texts for line in text.split("\n") if line.strip()]


def names(setup, extras):
    return {canonicalize_name(requirement.name) for requirement in requirements(setup, extras)}


def test_the_extra_vllm_takes_the_versions_that_trl_supports(setup):
    (ours,) = map(Requirement, setup["options.extras_require"]["vllm"].split())
    (trls,) = (
        r for r in map(Requirement, requires("trl")) if r.name == "vllm" and r.marker.evaluate({"extra": "vllm"})
    )
    assert ours.specifier == trls.specifier


@pytest.mark.parametrize("name", FILES)
def test_every_requirement_is_pinned_within_its_range(setup, name):
    found, pins = requirements(setup, FILES[name]), read_pins(name)
    assert len(found) > 15
    for requirement in found:
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), str(requirement)


@pytest.mark.parametrize("name", FILES)
def test_no_pin_is_bound_to_a_machine(name):
    text = (ROOT / name).read_text()
    assert re.findall(r"://|@|\+\w+$|^-", text, re.MULTILINE) == []


# Files of `epo_trl` that are imported only where that extra is installed.
EXTRA_OF = {"lab/study/*": "study", "lab/credit_audit/*": "study", "lab/serve/server.py": "openenv"}
OPTIONAL = {"spacy"}  # without it, a field's error names the command that installs it


def imports(node, inside=False):
    """Yields the packages that code imports, and whether only a function does so."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.Import):
            yield from ((alias.name.partition(".")[0], inside) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield child.module.partition(".")[0], inside
        yield from imports(child, inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))


def test_what_the_package_imports_is_a_requirement_or_one_of_an_extra_inside_functions(setup):
    """A package that another one brings along may go with its next release."""
    homes, ever = packages_distributions(), names(setup, setup["options.extras_require"])
    found, missing = set(), []
    for path in (ROOT / "epo_trl").rglob("*.py"):
        here = path.relative_to(ROOT / "epo_trl")
        at_once = names(setup, [extra for files, extra in EXTRA_OF.items() if here.match(files)])
        for name, inside in imports(ast.parse(path.read_text())):
            if name in sys.stdlib_module_names or name == "epo_trl" or name in OPTIONAL:
                continue
            found.add(name)
            brought_by = {canonicalize_name(home) for home in homes.get(name, [name])}
            if not brought_by & (ever if inside else at_once):
                missing.append((str(here), name))
    assert len(found) > 25 and missing == []


@pytest.fixture(scope="module")
def page():
    return runpy.run_path(str(ROOT / "setup.py"), run_name="page")


def test_on_a_package_index_links_to_files_lead_to_the_repository(page):
    text = "[a](docs/a.md#b) ![p](docs/p.png) [s](#start) [u](https://localhost/x.md) [`x`](recipes/)"
    assert page["with_whole_links"](text, "U") == (
        "[a](U/blob/main/docs/a.md#b) ![p](U/raw/main/docs/p.png) [s](#start) [u](https://localhost/x.md) "
        "[`x`](U/blob/main/recipes/)"
    )


def test_every_file_that_readme_links_to_exists_so_that_its_url_will(page):
    links = [link.partition("#")[0] for link in page["LINK"].findall((ROOT / "README.md").read_text())]
    assert len(links) > 20 and all((ROOT / link).exists() for link in links)


def test_the_package_is_typed(setup):
    assert "Typing :: Typed" in setup["metadata"]["classifiers"] and (ROOT / "epo_trl" / "py.typed").is_file()
