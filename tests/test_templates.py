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
from epo_trl.envs.toy import ToySuite
from epo_trl.envs.webshop import WebShopSuite
from epo_trl.rollout import PromptTemplate, TemplateError
from epo_trl.rollout.templates import PARTS, TEMPLATES, render

ROOT = Path(__file__).parents[1]
SHIPPED = sorted(path.name for path in TEMPLATES.iterdir() if path.is_dir())
LISTED = {
    "alfworld": GeneratedAlfworld(n_train=2, n_iid=0, n_ood=0),
    "toy": ToySuite(),
    "tools": ToolSuite(WordGame, word_rows(), reward_funcs=[reward_func]),
}
PLAYED_WITH = {
    "alfworld": ("alfworld", "toy"),
    "compact": ("alfworld", "toy"),
    "compact_notes": ("alfworld",),
    "general": ("alfworld", "toy"),
    "general_compact": ("alfworld", "toy"),
    "general_free": ("alfworld", "toy", "tools"),
    "general_tags": ("alfworld", "toy"),
    "plain": ("alfworld", "toy", "tools"),
    "plain_list": ("alfworld", "toy"),
    "react": ("alfworld", "toy"),
    "tool_calls": ("tools",),
    "tools": ("tools",),
    "tools_compact": ("tools",),
}
SCIENCEWORLD = [name for name in SHIPPED if name.startswith("scienceworld")]
WEBSHOP = [name for name in SHIPPED if name.startswith("webshop")]


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


def test_there_are_templates():
    assert PLAYED_WITH.keys() | {*SCIENCEWORLD, *WEBSHOP} == set(SHIPPED) - {"corridor"}
    assert (len(SCIENCEWORLD), len(WEBSHOP)) == (4, 2)


@pytest.mark.parametrize(("name", "game"), [(name, game) for name, games in PLAYED_WITH.items() for game in games])
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
    with pytest.raises(TemplateError, match=r"first.txt: unknown field \['admissible_actions'\]"):
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


def test_alfworld_shows_all_that_the_paper_shows():
    template = PromptTemplate.load("alfworld")
    for field in ("observation", "admissible_actions", "task"):
        assert f"{{{field}}}" in template.first
    for field in ("task", "turns_taken", "history_length", "history", "turn", "observation", "admissible_actions"):
        assert f"{{{field}}}" in template.next
    assert all(f"{{{field}}}" in template.history for field in ("observation", "action"))
    for text in (template.first, template.next, template.followup):
        assert "<think> </think>" in text and "<action> </action>" in text


def test_lists_are_joined_by_commas_and_braces_in_values_are_left_alone():
    text = render("{a} | {b} | {c:02d} | {{d}}", {"a": ("go", "look"), "b": "{c}", "c": 3})
    assert text == "go, look | {c} | 03 | {d}"
    assert render("[{a}] {b: x }", {"a": (), "b": (3, 4.5)}) == "[] 3 x 4.5"


def test_a_template_of_the_user_is_read_from_its_folder(folder, monkeypatch):
    (folder / "first.txt").write_text("Aufgabe für dich: {task}\n\n", encoding="utf-8-sig")  # as Windows may save it
    template = PromptTemplate.load(folder)
    assert template.first == "Aufgabe für dich: {task}"
    assert template == PromptTemplate.load(str(folder))
    monkeypatch.setenv("HOME", str(folder.parent))
    assert template == replace(PromptTemplate.load("~/mine"), name=str(folder))  # no shell expands it in a YAML file
    assert template.next == PromptTemplate.load("alfworld").next


def test_an_unknown_name_is_named_with_the_templates_there_are():
    with pytest.raises(TemplateError, match=f"'alfwrld'; .* {', '.join(SHIPPED)}, or a folder .*first.txt"):
        PromptTemplate.load("alfwrld")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "mine/next.txt is missing"),
        ("{observation}", "mine/next.txt never shows {task}"),
        ('{task} {"json": 1', "mine/next.txt: .*write {{ and }} for literal braces"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(folder, text, says):
    (folder / "next.txt").write_text(text) if text else (folder / "next.txt").unlink()
    with pytest.raises(TemplateError, match=says):
        PromptTemplate.load(folder)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("field", ["tsk", "", "observation[0]"])
def test_an_unknown_field_is_an_error_that_names_file_and_field(folder, part, field):
    (folder / f"{part}.txt").write_text(f"{{task}} {{{field}}}" if part != "history" else f"{{{field}}}")
    message = rf"mine', {part}.txt: unknown field \['{field}'\]; expected one of .*turn".replace("[0]", r"\[0\]")
    with pytest.raises(TemplateError, match=message):
        PromptTemplate.load(folder).check({"task_type": "find"})


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ("first", "history"),
        ("history", "task"),
        ("example", "observation"),
        ("followup", "examples"),
    ],
)
def test_a_field_of_another_file_is_unknown(folder, part, field):
    (folder / f"{part}.txt").write_text(f"{{task}} {{{field}}}" if part != "history" else f"{{{field}}}")
    with pytest.raises(TemplateError, match=rf"{part}.txt: unknown field \['{field}'\]"):
        PromptTemplate.load(folder).check({})


@pytest.mark.parametrize(("part", "field"), [("first", "score:d"), ("next", "task:d"), ("history", "turn:%Y")])
def test_a_format_that_a_value_does_not_have_is_an_error_before_the_first_episode(folder, part, field):
    (folder / f"{part}.txt").write_text(f"{{task}} {{{field}}}" if part != "history" else f"{{{field}}}")
    with pytest.raises(TemplateError, match=f"mine', {part}.txt: a placeholder does not fit its value: "):
        PromptTemplate.load(folder).check({"score": 0.5})


def test_the_package_ships_every_template_file():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    patterns = config["options.package_data"]["epo_trl"].split()
    shipped = {path for pattern in patterns for path in (ROOT / "epo_trl").glob(pattern)}
    files = {path for path in TEMPLATES.rglob("*") if path.is_file()}
    assert len(files) >= 4 * len(SHIPPED)
    assert files <= shipped
