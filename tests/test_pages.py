"""What the pages for newcomers say of the repository is true: files, fields, numbers, and quoted messages."""

import ast
import json
import re
from dataclasses import fields
from pathlib import Path
from statistics import fmean, stdev

import pytest
import yaml
from trl import ModelConfig

from epo_trl.envs.alfworld.alfworld_suite import AlfworldArguments
from epo_trl.envs.scienceworld import ScienceWorldSuite
from epo_trl.envs.webshop import WebShopSuite
from epo_trl.evaluation import protocol_names
from epo_trl.trainers import EPOConfig, EPOPPOConfig

ROOT = Path(__file__).parents[1]
PAPER = "recipes/alfworld/qwen2.5-3b_8gpu.yaml"
SETTINGS = (EPOPPOConfig, ModelConfig, AlfworldArguments, ScienceWorldSuite, WebShopSuite)
FIELDS = {field.name for kind in SETTINGS for field in fields(kind)} | {"environment", "algorithm"}


def page(name):
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def rows(text):
    """Returns the cells of all rows of all tables."""
    found = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in found]


def settings(text):
    """Returns the settings of a page, `name: value` in code, as pairs."""
    spans = re.findall(r"(?<!`)`([a-z]\w*: [^`]+)`(?!`)", text)
    return [pair for span in spans for pair in yaml.safe_load(span).items()]


def test_the_index_lists_every_page():
    linked = set(re.findall(r"\]\(([\w./]+)\)", page("README.md")))
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert len(pages) > 20
    assert pages - linked == set()


def test_every_recipe_config_and_study_has_a_row_that_says_whether_it_has_run():
    patterns = ("recipes/**/*.yaml", "recipes/**/*.py", "studies/*.yaml", "accelerate_configs/*.yaml")
    found = {path.relative_to(ROOT).as_posix() for pattern in patterns for path in ROOT.glob(pattern)}
    listed = {name: row for row in rows(page("recipes.md")) for name in re.findall(r"\]\(\.\./([\w./\-]+)\)", row[0])}
    assert len(found) > 30
    assert listed.keys() == found
    for name in found:
        if name.endswith(".yaml") and not name.startswith("accelerate_configs"):
            head, state = (ROOT / name).read_text().split("\n\n")[0], listed[name][-1]
            assert state and ("not run" in state) == ("ot run here" in head), name


def test_the_sizes_of_a_batch_are_those_of_the_recipe():
    config = yaml.safe_load((ROOT / PAPER).read_text())
    rows_of, accumulated, kept = (
        config[name] for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation")
    )
    per_step, episodes, group = rows_of * accumulated * 8, rows_of * kept * 8, config["num_generations"]
    shown = {row[0]: row[2] for row in rows(page("concepts.md")) if len(row) == 3}
    assert PAPER in page("concepts.md")
    assert shown["episodes of an optimizer step"] == f"{rows_of} x {accumulated} x 8 = {per_step}"
    assert shown["episodes of an RL step"] == f"{rows_of} x {kept} x 8 = {episodes}"
    assert shown["tasks of an RL step"] == f"{episodes} / {group} = {episodes // group}"
    updates = kept // accumulated
    assert shown["optimizer steps of an RL step"] == f"{kept} x 1 / {accumulated} = {updates}"
    assert shown["RL steps of the run"] == f"{config['max_steps']} / {updates} = {config['max_steps'] // updates}"


@pytest.mark.parametrize("name", ["migrating.md", "troubleshooting.md", "choosing.md", "recipes.md"])
def test_settings_that_a_page_names_are_fields(name):
    found = settings(page(name))
    assert [key for key, _ in found if key not in FIELDS] == []
    assert len(found) > 20 or name not in ("migrating.md", "troubleshooting.md")


def test_the_counterparts_of_the_releases_settings_are_those_of_the_recipe():
    recipe = yaml.safe_load((ROOT / PAPER).read_text())
    given = [pair for row in rows(page("migrating.md")) for pair in settings(row[1])]
    shared = [pair for pair in given if pair[0] in recipe and pair[0] != "algorithm"]  # the page names both algorithms
    assert len(shared) > 20
    assert [pair for pair in shared if recipe[pair[0]] != pair[1]] == []


def test_the_settings_that_are_closest_to_the_release_build_a_config():
    (block,) = re.findall(r"```yaml\n(.*?)```", page("migrating.md"), re.DOTALL)
    EPOPPOConfig("unused", use_cpu=True, bf16=False, **yaml.safe_load(block))
    assert yaml.safe_load(block)["protocol"] in protocol_names()
    assert EPOConfig("unused", use_cpu=True, bf16=False).entropy_method == ["epo"]


def messages():
    """Returns the texts of the package and the recipes, with `...` for what is filled in."""
    found = []
    for path in [*ROOT.glob("epo_trl/**/*.py"), *ROOT.glob("recipes/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "..." for part in node.values]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def holds(message, parts):
    """Returns whether a text has the parts in this order."""
    place = 0
    for part in parts:
        place = message.find(part, place) + len(part)
        if place < len(part):
            return False
    return True


def test_quoted_messages_are_in_the_code():
    quotes = re.findall(r"```text\n(.*?)\n```", page("troubleshooting.md"), re.DOTALL)
    assert len(quotes) > 10
    known = messages()
    for quote in quotes:
        parts = [part.strip() for part in " ".join(quote.split()).split("...")]
        assert max(map(len, parts)) > 10, quote
        assert any(holds(message, parts) for message in known), quote


@pytest.mark.parametrize("name", ["migrating.md", "troubleshooting.md", "concepts.md"])
def test_metrics_that_a_page_names_are_documented(name):
    prefixes = "env|stop|rollout|entropy|epo|critic|guard|run|time|sampling"
    named = set(re.findall(rf"`((?:{prefixes})/\w+)`", page(name)))
    documented = page("metrics.md")
    assert [one for one in sorted(named) if f"`{one}`" not in documented and not one.startswith("sampling/")] == []


def test_every_metric_has_a_meaning_and_says_what_is_healthy():
    found = [row for row in rows(page("metrics.md")) if row[0].startswith("`")]
    assert len(found) > 70
    assert [row for row in found if len(row) != 4 or not row[1] or not row[3]] == []


def test_the_table_of_the_plain_games_is_that_of_the_reports():
    """Mean, deviation and values of three seeds, from the numbers of wins."""
    written = (ROOT / "results" / "alfworld_plain" / "README.md").read_text(encoding="utf-8")
    for kind in ("sft", "rl", "defect-sft", "defect-rl", "defect-rl120"):
        for split in ("iid", "ood"):
            rates = []
            for seed in (0, 1, 2):
                kept = json.loads((ROOT / f"results/alfworld_plain/{kind}-seed{seed}-greedy.json").read_text())
                [report] = [r for r in kept["reports"] if r["split"] == split]
                assert report["protocol"]["name"] == "alfworld-plain50"
                rates.append(100 * report["wins"] / report["episodes"])
            summary = f"{fmean(rates):.1f} ± {stdev(rates):.1f}"
            assert f"({', '.join(f'{rate:.1f}' for rate in rates)})" in written
            assert summary in written
