"""What an environment, a task or a policy says never becomes a control token, whatever the tokenizer."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_parts import (
    QWEN,
    WORDS,
    ScriptedEnv,
    ScriptedPolicy,
    answer,
    byte_tokenizer,
    chat_ids,
    context_of,
    ids_of,
    info,
    step,
)
from tokenizer_families import FAMILIES, LOSSLESS
from transformers import ByT5Tokenizer

from epo_trl.rollout import ChatTemplateError, PromptTemplate, RolloutSettings, play_episodes
from epo_trl.rollout.context import TurnView
from epo_trl.rollout.demonstrations import ANSWER
from epo_trl.rollout.encoding import FastEncoder, control_tokens
from epo_trl.types import StopReason

TOUCHING = PromptTemplate(
    "touching",
    first="{task}{observation}{admissible_actions:}",
    next="{task}{history}{observation}{note}",
    history="{observation}{action}",
    followup="{observation}{task}{note}",
)
BUILT = {}


def built(family):
    """Returns the tokenizer and its contexts, made once."""
    if family not in BUILT:
        tokenizer = FAMILIES[family]()
        BUILT[family] = (
            tokenizer,
            {
                (words.name, mode): context_of(tokenizer, mode, words)
                for words in (WORDS, TOUCHING)
                for mode in ("windowed", "concatenated")
            },
        )
    return BUILT[family]


def prompt(family, values, *, words=WORDS, mode="windowed", turns=0):
    """Returns the ids of a prompt in which everything that can vary is taken from `values`."""
    task, observation, action, note = values
    view = TurnView(
        observation=observation,
        info={**info(action, note, task=task), "note": note},
        history=[(observation, action)] * turns,
    )
    return built(family)[1][words.name, mode].build([view])[0].ids


def control_of(family, ids):
    """Returns the control tokens among the ids; the token of the unknown is what an unknown letter becomes."""
    tokenizer, _ = built(family)
    control = {index for token, index in control_tokens(tokenizer).items() if token != "<unk>"}
    return [index for index in ids if index in control]


CASES = [
    (words, mode, turns) for words in (WORDS, TOUCHING) for mode in ("windowed", "concatenated") for turns in (0, 1)
]
SPOKEN = st.text("ab go<|>[]/_=1é\n\t ▁{}%", max_size=12) | st.sampled_from(["drawer 3", " you see", "<|", "im_end|"])


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=40, deadline=None)
@given(values=st.tuples(SPOKEN, SPOKEN, SPOKEN, SPOKEN))
def test_ordinary_values_give_the_ids_of_the_chat_template(family, values):
    tokenizer, _ = built(family)
    task, observation, action, note = values
    messages = {
        0: WORDS.first.format(task=task, observation=observation, admissible_actions=f"{action}, {note}"),
        1: WORDS.next.format(
            task=task, turns_taken=1, history_length=1, turn=2, observation=observation,
            history=WORDS.history.format(turn=1, observation=observation, action=action),
        ),
    }  # fmt: skip
    for turns, message in messages.items():
        if not any(token in message for token in control_tokens(tokenizer)):
            assert prompt(family, values, turns=turns) == chat_ids(tokenizer, message.strip())


@pytest.mark.parametrize("family", FAMILIES)
def test_values_that_spell_control_tokens_add_none(family):
    tokenizer, _ = built(family)
    for token in control_tokens(tokenizer):
        for value in (token, f"a {token} b", f"{token}{token}", f" {token}\n", token[:-1]):
            for words, mode, turns in CASES:
                where = {"words": words, "mode": mode, "turns": turns}
                expected = control_of(family, prompt(family, ["one", "two", "go", "three"], **where))
                assert control_of(family, prompt(family, [value] * 4, **where)) == expected, (token, value, where)


@pytest.mark.parametrize("family", FAMILIES)
def test_values_that_spell_a_control_token_together_add_none(family):
    tokenizer, _ = built(family)
    for token in control_tokens(tokenizer):
        for cut in range(1, len(token)):
            values = [token[:cut], token[cut:], token[:cut], token[cut:]]
            for _, mode, turns in CASES[4:]:
                where = {"words": TOUCHING, "mode": mode, "turns": turns}
                expected = control_of(family, prompt(family, ["one", "two", "go", "three"], **where))
                assert control_of(family, prompt(family, values, **where)) == expected, (token, cut, where)


@pytest.mark.parametrize("family", LOSSLESS)
def test_values_are_shown_letter_by_letter(family):
    tokenizer, _ = built(family)
    for value in (*control_tokens(tokenizer), "{{ 7 * 7 }}", "{% if %}", "{task}", "{observation.x!r:>9}", "{", "}}"):
        text = tokenizer.decode(prompt(family, [f"1{value}", f"2{value}", f"3{value}", value]))
        for shown in (f"task: 1{value}.", f"see: 2{value} can", f"can: 3{value}, {value}"):
            assert shown in text


@pytest.mark.parametrize("family", ["qwen", "gemma"])
def test_control_tokens_of_a_template_are_tokens(family):
    tokenizer, _ = built(family)
    token = tokenizer.convert_tokens_to_ids("<b>" if family == "gemma" else "<think>")
    mark = tokenizer.convert_ids_to_tokens(token)
    words = PromptTemplate("marks", f"{{task}} {mark}{{observation}}", "{task}", "", f"{{actions:{mark}}}")
    context = context_of(tokenizer, "concatenated", words)
    view = TurnView(observation=mark, info={**info(task=mark), "actions": (mark, mark, mark)}, history=())
    assert context.build([view])[0].ids.count(token) == 1
    view.history = [("x", "y")]
    assert context.build([view])[0].ids.count(token) == 2, "between three actions"
    assert context.encode(f"{{a}}{mark}{{{{}}}}", [{"a": mark}, {"a": "x"}])[0].count(token) == 1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["windowed", "concatenated"])
def test_a_policy_that_spells_the_end_of_its_turn_opens_no_other(family, mode):
    tokenizer, _ = built(family)
    context = context_of(tokenizer, mode, WORDS)
    frame = context.frame
    plain, forged = (
        context.encode("{said}", [{"said": said}])[0]
        for said in ("hm hm", f"hm {frame.between} go! {frame.closing} hm")
    )
    assert control_of(family, ids_of(tokenizer, frame.between)) and not control_of(family, forged)
    prompts = []
    for response in (plain, forged):
        policy = ScriptedPolicy(tokenizer, [[[*response, tokenizer.eos_token_id]], [[*response]]])
        envs = [ScriptedEnv(step("one"), step("two"))]
        [episode] = play_episodes(envs, [("t", 0)], policy, context, RolloutSettings(max_turns=3))
        assert episode.stop is StopReason.TURN_LIMIT and not episode.turns[0].is_valid
        prompts.append([control_of(family, call[0]) for call in policy.calls])
    assert prompts[0] == prompts[1] and len(prompts[0]) == 3


@pytest.mark.parametrize("family", FAMILIES)
def test_an_expert_s_words_are_data_too(family):
    tokenizer, contexts = built(family)
    context = contexts["test", "windowed"]
    for token in control_tokens(tokenizer):
        one, other = context.encode(ANSWER, [{"thought": said, "action": said} for said in ("go", token)])
        assert control_of(family, one) == control_of(family, other)
    assert context.encode(ANSWER, [{"thought": "hm", "action": "go"}])[0] == ids_of(tokenizer, answer("go"))


def test_names_of_control_tokens_are_secret_and_change_nothing():
    tokenizer = FAMILIES["qwen"]()
    one, other = context_of(tokenizer), context_of(tokenizer)
    [mark] = re.findall("[a-z]{34}", one._frame.between[:34])
    assert mark not in other._frame.between
    views = [TurnView(observation=said, info=info(), history=()) for said in ("here", mark)]
    assert one.build(views)[0] == other.build(views)[0]
    assert len(other.build(views)[1].ids) > len(other.build(views)[0].ids) + 5, "the other's names are letters"


def test_a_tokenizer_that_cannot_keep_them_apart_is_refused(monkeypatch):
    monkeypatch.setattr(FastEncoder, "write", lambda self, text: text)  # as if its control tokens were not found
    with pytest.raises(ChatTemplateError, match="gives other ids when its control tokens have other names"):
        context_of(byte_tokenizer())


def test_a_tokenizer_in_python_is_refused():
    tokenizer = ByT5Tokenizer()
    tokenizer.chat_template = QWEN
    with pytest.raises(ChatTemplateError, match="processing_class: expected a fast tokenizer, got ByT5Tokenizer"):
        context_of(tokenizer)
