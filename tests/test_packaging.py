"""The pins fit the requirements, and the package says what it needs."""

import configparser
import re
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
EXTRAS = ("alfworld", "scienceworld", "deepspeed", "notebooks", "docs", "dev")  # what `make` installs


@pytest.fixture(scope="module")
def setup():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


@pytest.fixture(scope="module")
def pins():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    requirements = [Requirement(line) for line in lines]
    return {canonicalize_name(r.name): next(iter(r.specifier)).version for r in requirements}


def requirements(setup):
    texts = [setup["options"]["install_requires"], *(setup["options.extras_require"][extra] for extra in EXTRAS)]
    return [Requirement(line) for text in texts for line in text.split("\n") if line.strip()]


def test_the_extra_vllm_takes_the_versions_that_trl_supports(setup):
    (ours,) = map(Requirement, setup["options.extras_require"]["vllm"].split())
    (trls,) = (
        r for r in map(Requirement, requires("trl")) if r.name == "vllm" and r.marker.evaluate({"extra": "vllm"})
    )
    assert ours.specifier == trls.specifier


def test_every_requirement_that_make_installs_is_pinned_within_its_range(setup, pins):
    found = requirements(setup)
    assert len(found) > 15
    for requirement in found:
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), str(requirement)


def test_no_pin_is_bound_to_a_machine():
    text = (ROOT / "constraints.txt").read_text()
    assert re.findall(r"://|@|\+\w+$|^-", text, re.MULTILINE) == []


def test_make_installs_the_extras_that_are_tested_here():
    assert f"EXTRAS ?= {','.join(EXTRAS)}\n" in (ROOT / "Makefile").read_text()


def test_all_means_all_extras(setup):
    extras = setup["options.extras_require"]
    named = Requirement(extras["all"].strip()).extras
    assert named == set(extras) - {"all"}
