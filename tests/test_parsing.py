"""From a response to an action."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epo_trl.rollout import parse_response
from epo_trl.rollout.parsing import MAX_PASSED_CHARS

ADMISSIBLE = ("go to drawer 1", "Take Mug 2", "look")
NO_THINK = "no <think> block before the action"


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("<think> x </think> <action> look </action>", "look"),
        ("<think>x</think><action>look</action>", "look"),
        ("<think>\nx\ny\n</think>\n<action>\n  look\n</action>\n", "look"),
        ("<think></think><action>look</action>", "look"),
        ("<think>x</think><action>LOOK</action>", "look"),
        ("<think>x</think><action>go  to\n drawer\t1</action>", "go to drawer 1"),
        ("<think>x</think><action>take mug 2</action>", "Take Mug 2"),  # the environment's own spelling
        ("well, <think>x</think> so <action>look</action> it is", "look"),
        ("<think>a</think><think>b</think><action>look</action>", "look"),
        ("<THINK>x</Think> <ACTION>look</aCtIoN>", "look"),
        ("\u0130<think>x</think><Action>look</action>", "look"),  # a letter that gets longer in lower case
    ],
)
def test_a_well_formed_admissible_action_is_valid(text, action):
    parsed = parse_response(text, ADMISSIBLE)
    assert (parsed.is_valid, parsed.action, parsed.error) == (True, action, "")


@pytest.mark.parametrize(
    ("text", "action", "error"),
    [
        ("", "", "no <action> block"),
        ("look", "look", "no <action> block"),
        ("<thin\u212a>x</thin\u212a><action>look</action>", "look", NO_THINK),  # the sign of kelvin is no k
        ("<think>x</think> <action> look", "<think>x</think> <action> look", "no <action> block"),
        ("<think>x</think> look</action>", "<think>x</think> look</action>", "no <action> block"),
        ("<action>look</action> <action>go</action>", "<action>look</action> <action>go</action>", "2 <action> blocks"),
        ("<think><action>look</action></think><action>look</action>", "<think><action>look</action></think>"
         "<action>look</action>", "2 <action> blocks"),
        ("<action>look</action>", "look", NO_THINK),
        ("<think>x <action>look</action>", "look", NO_THINK),
        ("x</think><action>look</action>", "look", NO_THINK),
        ("<action>look</action><think>x</think>", "look", NO_THINK),
        ("<think>x <action>look</action></think>", "look", NO_THINK),
        ("<action>TAKE mug 2</action>", "Take Mug 2", NO_THINK),
        ("<action>fly</action>", "fly", NO_THINK),
        ("<think>x</think><action>fly  Away</action>", "fly Away", "not an admissible action"),
        ("<think>x</think><action> </action>", "", "not an admissible action"),
        ("<think>x</think><action>look </action", "<think>x</think><action>look </action", "no <action> block"),
    ],
)  # fmt: skip
def test_any_other_response_is_invalid_and_says_why(text, action, error):
    parsed = parse_response(text, ADMISSIBLE)
    assert not parsed.is_valid
    assert parsed.action == action
    assert parsed.error.startswith(error)


def test_the_thought_is_kept_even_if_the_action_is_not_valid():
    assert parse_response("<think> a \n b </think><action>look</action>", ADMISSIBLE).thought == "a b"
    assert parse_response("<think>a</think>", ADMISSIBLE).thought == "a"
    assert parse_response("<action>look</action>", ADMISSIBLE).thought == ""


@pytest.mark.parametrize("text", ["{}", "<action>{}</action>", "<think>x</think><action>{}</action>"])
def test_of_a_long_response_its_end_is_passed_on(text):
    long = "a " * 500 + "end"
    action = parse_response(text.format(long), ADMISSIBLE).action
    assert len(action) == MAX_PASSED_CHARS
    assert action.endswith("end")


def test_any_action_is_admissible_where_none_are_listed():
    parsed = parse_response("<think>x</think><action> Pick  up THE pot </action>", None)
    assert (parsed.action, parsed.error) == ("Pick up THE pot", "")
    assert parse_response("<think>x</think><action> </action>", None).error == "not an admissible action"
    assert not parse_response("<action>go</action>", None).is_valid


@pytest.mark.parametrize("verbatim", [False, True])
def test_a_long_action_is_passed_on_whole_where_none_are_listed(verbatim):
    long = "search[" + "soft " * 100 + "hoodie]"
    parsed = parse_response(f"<think>x</think><action>{long}</action>", None, verbatim=verbatim)
    assert (parsed.action, parsed.error) == (long, "")


PIECES = st.sampled_from(["<think>", "</think>", "<action>", "</action>", "look", "LOOK", "Take Mug 2", " ", "\n", "<"])
RESPONSES = st.text() | st.lists(PIECES | st.text(max_size=3), max_size=12).map("".join)


@settings(deadline=None)
@given(text=RESPONSES, admissible=st.lists(st.text() | PIECES), require_think=st.booleans())
def test_any_text_has_an_action_and_a_valid_one_is_admissible(text, admissible, require_think):
    parsed = parse_response(text, admissible, require_think=require_think)
    assert isinstance(parsed.action, str)
    assert parsed.is_valid == (parsed.error == "")
    if parsed.is_valid:
        assert parsed.action in admissible
    else:
        assert len(parsed.action) <= MAX_PASSED_CHARS or parsed.action in admissible


def test_an_exact_spelling_goes_before_one_that_differs_in_case():
    """In a roguelike `n` and `N` are two actions."""
    for said, meant in (("n", "n"), ("N", "N"), ("w", "W")):
        parsed = parse_response(f"<think> t </think><action>{said}</action>", ("n", "N", "W"))
        assert (parsed.action, parsed.is_valid) == (meant, True)
