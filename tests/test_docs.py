"""The reference pages are true: every config field and metric is there, links and named files lead somewhere."""

import inspect
import re
from pathlib import Path

import pytest
from method_table import CASES, config_of
from trainer_kit import make_ppo, make_trainer
from trl import GRPOTrainer

from epo_trl import EPOPPOTrainer, EPOTrainer

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / f"{name}.md" for name in ("README", "ARCHITECTURE", "CONTRIBUTING", "SUPPORT")]
PAGES += sorted((ROOT / "docs").glob("*.md"))
# What a trainer's log holds besides metrics.
NOT_METRICS = {"step"}
# Logged with `rollout_ahead` only, whose tests check them (test_rollout_ahead.py).
AHEAD = {"time/wait_for_rollout", "time/wait_for_update"}


def test_the_tables_of_config_fields_are_fresh(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    import make_config_tables

    text = make_config_tables.PAGE.read_text(encoding="utf-8")
    assert "| `epo_lambda` | `0.001` |" in text
    assert make_config_tables.page(text) == text, "run python docs/make_config_tables.py"


def documented_metrics():
    """Returns the names in the first column of the tables of metrics.md, in order."""
    names = []
    for line in (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            names += re.findall(r"`([^`]+)`", line.split("|")[1])
    return names


def matches(name, documented):
    pattern = re.escape(documented).replace(re.escape("..."), ".+").replace(re.escape("<task type>"), ".+")
    pattern = pattern.replace("<positions>", "[0-9_]+")
    return re.fullmatch(pattern, name) is not None


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    trainer = make_trainer(tmp_path_factory.mktemp("run"), max_steps=2)
    trainer.train()
    trainer.evaluate()
    ppo = make_ppo(tmp_path_factory.mktemp("ppo"), max_steps=2)
    ppo.train()
    runs = [trainer, ppo, make_trainer(tmp_path_factory.mktemp("groups"), max_steps=1, max_resamples=1,
                                       policy_method="method_examples:KeepNothing")]  # fmt: skip
    for name in ("decision-bonus", "variance-filter", "kl-cov"):  # test_method_table.py has the others
        changes = config_of(name, CASES[name].settings, CASES[name].fields)
        runs.append(make_trainer(tmp_path_factory.mktemp(name), max_steps=2, **changes))
    for run in runs[2:]:
        run.train()
    lines = [line for run in runs for line in run.state.log_history]
    names = {name for line in lines for name in line} - NOT_METRICS
    return {re.sub(r"^eval_[a-z]+/", "", name) for name in names}


@pytest.mark.slow
def test_every_logged_metric_is_documented(logged):
    assert {"epo/beta", "success_rate_low", "env/turns", "critic/value_loss"} <= logged
    names = documented_metrics()
    assert {name for name in logged if not any(matches(name, known) for known in names)} == set()


@pytest.mark.slow
def test_every_metric_of_ours_that_is_documented_is_logged(logged):
    kinds = ("env", "stop", "rollout", "entropy", "critic", "gae", "guard", "run", "time", "epo", "kl-cov")
    ours = [name for name in documented_metrics() if name.partition("/")[0] in kinds and name not in AHEAD]
    assert len(ours) > 30
    assert [name for name in ours if not any(matches(given, name) for given in logged)] == []


def test_every_metric_is_documented_once():
    names = documented_metrics()
    assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_pictures_lead_to_files(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page):
    text = page.read_text(encoding="utf-8")
    named = re.findall(
        r"\b((?:recipes|accelerate_configs|docs|tests|notebooks|benchmarks|epo_trl)/[\w./\-]+\.\w+)", text
    )
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_pages_name_no_path_of_a_machine():
    for page in PAGES:
        assert re.findall(r"(?<![\w.])/(?:tmp|home|work|root|usr)/", page.read_text(encoding="utf-8")) == [], page.name


def overridden(kind):
    """Returns the methods of TRL's trainer and its bases, without `__init__`, that a trainer overrides."""
    theirs = {name for base in GRPOTrainer.__mro__ if base is not object for name in vars(base)}
    ours = [base for base in kind.__mro__ if base.__module__.startswith("epo_trl.")]
    names = {name for base in ours for name, value in vars(base).items() if inspect.isfunction(value)}
    return (names & theirs) - {"__init__"}


def test_the_architecture_gives_the_number_of_overridden_methods():
    counts = len(overridden(EPOTrainer)), len(overridden(EPOPPOTrainer))
    numbers = "`EPOTrainer` overrides `__init__` and {} methods, `EPOPPOTrainer` `__init__` and {}.".format(*counts)
    assert numbers in " ".join(PAGES[1].read_text().split())


def test_the_methods_that_replace_the_original_are_those_of_the_table():
    ours = [base for base in EPOPPOTrainer.__mro__ if base.__module__.startswith("epo_trl.")]
    source = "".join(inspect.getsource(base) for base in ours)
    replaced = {name for name in overridden(EPOPPOTrainer) if f"super().{name}(" not in source}
    section = PAGES[1].read_text().partition("## How TRL is extended")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == replaced
    assert len(replaced) == 3  # "The three that never do"


def test_a_clone_cannot_be_taken_for_the_package():
    """A folder `epo_trl` without `__init__.py` is a namespace package to every script in the folder above it."""
    clones = [line for page in PAGES for line in page.read_text().splitlines() if "git clone" in line]
    assert len(clones) == 1  # so the address stands in one place
    folder = re.fullmatch(r"git clone <[^>]+> (\S+) && cd \1", clones[0])[1]
    assert not folder.isidentifier()
