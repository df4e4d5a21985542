"""Prompt templates: those that ship work with the environments that ship, a broken one names its file and field."""

import configparser
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from word_game import WordGame, reward_func, word_rows

from epo_trl.envs.alfworld import GeneratedAlfworld
from epo_trl.envs.scienceworld import ScienceWorldSuite
from epo_trl.envs.tools.suite import ToolSuite, tool_call
from epo_trl.envs.webshop import WebShopSuite
from epo_trl.rollout import PromptTemplate, TemplateError
from epo_trl.rollout.templates import TEMPLATES, render

ROOT = Path(__file__).parents[1]
SHIPPED = sorted(path.name for path in TEMPLATES.iterdir() if path.is_dir())
LISTED = {
    "alfworld": GeneratedAlfworld(n_train=2, n_iid=0, n_ood=0),
    "tools": ToolSuite(WordGame, word_rows(), reward_funcs=[reward_func]),
}
SCIENCEWORLD = [name for name in SHIPPED if name.startswith("scienceworld")]
WEBSHOP = [name for name in SHIPPED if name.startswith("webshop")]
TOOLS = ["general_free", "plain", *(name for name in SHIPPED if name.startswith("tool"))]
PLAYED_WITH = [(name, "tools") for name in TOOLS]
PLAYED_WITH += [(name, "alfworld") for name in SHIPPED if not name.startswith(("corridor", "science", "tool", "web"))]


def views_of(suite, actions):
    """Returns the first observations and infos of a game."""
    env = suite.make_env()
    observation, info = env.reset(seed=0, options={"task_id": suite.task_ids("train")[0]})
    views = [(observation, info)]
    for action in actions:
        observation, _, _, _, info = env.step(action or info["admissible_actions"][0])
        views.append((observation, info))
    env.close()
    return views


@pytest.fixture
def folder(tmp_path):
    """Returns a copy of a shipped template that a test may break."""
    return Path(shutil.copytree(TEMPLATES / "alfworld", tmp_path / "mine"))


def fields(observation, info):
    return {**info, "observation": observation, "turn": 2, "turns_taken": 1, "history": "PAST", "history_length": 1,
            "examples": "SHOWN "}  # fmt: skip


@pytest.mark.parametrize(("name", "game"), PLAYED_WITH)
def test_a_shipped_template_renders_on_what_environments_really_say(name, game):
    actions = [tool_call("guess", guess="[crown]")] * 2 if game == "tools" else [None] * 3
    marks = () if name == "tools" else ("{", "}")  # that one shows what a call in JSON looks like
    assert_renders(PromptTemplate.load(name), views_of(LISTED[game], actions), marks)


@pytest.mark.parametrize("name", WEBSHOP)
def test_the_webshop_templates_show_the_page_and_what_can_be_done(name):
    suite = WebShopSuite(goods="generated", n_products=50, n_train=5, n_iid=0)
    template = PromptTemplate.load(name)
    views = views_of(suite, ["search[sneakers]", "click[< prev]"])
    for observation, info in views:
        template.check(info)
        for part in ("first", "next", "followup"):
            text = render(getattr(template, part), fields(observation, info))
            assert all(shown in text for shown in info["content"]) and "('" not in text
            assert part == "followup" or info["task"] in text
            assert name == "webshop_compact" or all(action in text for action in info["actions"])
    assert "PAST" in render(template.next, fields(*views[1]))
    assert "search[sneakers]" in template.past([(views[0][0], "search[sneakers]")])


@pytest.mark.games
def test_the_scienceworld_templates_render_on_what_it_really_says():
    listing, plain = ScienceWorldSuite(list_actions=True), ScienceWorldSuite()
    seen = views_of(listing, ["look around", "sing"])
    for name in SCIENCEWORLD:
        assert_renders(PromptTemplate.load(name), seen)
    unlisted = views_of(plain, ["look around"])
    for name in set(SCIENCEWORLD) - {"scienceworld_actions"}:
        assert_renders(PromptTemplate.load(name), unlisted)
    with pytest.raises(
        TemplateError, match=r"first.txt: expected fields from .*, got KeyError\('admissible_actions'\)"
    ):
        PromptTemplate.load("scienceworld_actions").check(unlisted[0][1])


def assert_renders(template, seen, marks=("{", "}")):
    for observation, info in seen:
        template.check(info)
        first, later, followup = (
            render(getattr(template, part), fields(observation, info)) for part in ("first", "next", "followup")
        )
        assert info["task"] in first and info["task"] in later
        assert observation in later and observation in followup
        assert "PAST" in later
        assert not any(mark in text for mark in (*marks, "('", "None") for text in (first, later, followup))
        past = template.past([(observation, "go north")])
        assert "go north" in past


def test_lists_are_joined_by_commas_and_braces_in_values_are_left_alone():
    text = render("{a} | {b} | {c:02d} | {{d}}", {"a": ("go", "look"), "b": "{c}", "c": 3})
    assert text == "go, look | {c} | 03 | {d}"
    assert render("[{a}] {b: x }", {"a": (), "b": (3, 4.5)}) == "[] 3 x 4.5"


def test_a_template_of_the_user_is_read_from_its_folder(folder, monkeypatch):
    (folder / "first.txt").write_text("Aufgabe für dich: {task}\n\n", encoding="utf-8-sig")  # as Windows may save it
    template = PromptTemplate.load(folder)
    assert template.first == "Aufgabe für dich: {task}"
    monkeypatch.setenv("HOME", str(folder.parent))
    assert template == replace(PromptTemplate.load("~/mine"), name=str(folder))  # no shell expands it in a YAML file
    assert template.next == PromptTemplate.load("alfworld").next


@pytest.mark.parametrize(
    ("part", "text", "says"),
    [
        ("next", "{observation}", "mine/next.txt never shows {task}"),
        ("next", '{task} {"json": 1', "mine/next.txt: .*write {{ and }} for literal braces"),
        ("first", "{task} {tsk}", r"mine', first.txt: expected fields from .*turn.*, got KeyError\('tsk'\)"),
        ("first", "{task} {history}", r"first.txt: expected .*KeyError\('history'\)"),
        ("followup", "{observation[0]}", "followup.txt: expected .*IndexError"),
        ("history", "{task}", r"history.txt: expected .*KeyError\('task'\)"),
        ("history", "{turn:%Y}", "mine', history.txt: expected .*ValueError"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_before_the_first_episode(folder, part, text, says):
    (folder / f"{part}.txt").write_text(text)
    with pytest.raises(TemplateError, match=says):
        PromptTemplate.load(folder).check({"task_type": "find"})


def test_the_package_ships_every_template_file():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    patterns = config["options.package_data"]["epo_trl"].split()
    shipped = {path for pattern in patterns for path in (ROOT / "epo_trl").glob(pattern)}
    files = {path for path in TEMPLATES.rglob("*") if path.is_file()}
    assert len(files) >= 4 * len(SHIPPED)
    assert files <= shipped
