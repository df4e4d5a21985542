"""Tool calls in the formats of model families: what the chat template shows, and how a response is read."""

import json
from functools import cache

import pytest
import trl.chat_template_utils as templates
from rollout_parts import ScriptedEnv, byte_tokenizer, context_of, ids_of, info
from tool_worlds import chat_tokenizer
from transformers.utils import get_json_schema
from word_game import WordGame

from epo_trl.envs.tools import tool_call
from epo_trl.envs.tools.env import final_answer
from epo_trl.rollout import ChatTemplateError, PromptTemplate, RolloutSettings, play_episodes
from epo_trl.rollout.context import TurnView
from epo_trl.rollout.parsing import RawResponse, TaggedActions
from epo_trl.rollout.spec import action_format
from epo_trl.rollout.tool_calls import ToolCalls

CALL = '<tool_call>\n{"name": "guess", "arguments": {"guess": "[crane]"}}\n</tool_call>'
ACTION = tool_call("guess", guess="[crane]")
TEMPLATE = PromptTemplate.load("tool_calls")


@cache
def qwen3():
    return chat_tokenizer(["You are given a task. Call one tool at a time. Your task is to: play a game."])


def read(text, *, tools=(WordGame.guess,), require_think=False):
    response = RawResponse(ids_of(qwen3(), text + "<|im_end|>"), "", "<|im_end|>\n<|im_start|>assistant\n")
    return ToolCalls(qwen3(), tools).read(response, None, require_think=require_think)


@pytest.mark.parametrize(
    ("text", "action", "thought", "error"),
    [
        (CALL, ACTION, "", ""),
        (f"<think>\nhm\n</think>\n\n{CALL}", ACTION, "hm", ""),
        (f"I guess.\n{CALL}", ACTION, "", ""),
        (CALL + CALL, "", "", "2 tool calls, expected one"),
        ("crane", "crane", "", "no tool call"),
        ('<tool_call>\n{"name": "guess", "argu', None, "", "no tool call"),
        ("", "", "", "no tool call"),
        ('<tool_call>\n{"name": "fly"}\n</tool_call>', tool_call("fly"), "", ""),  # the environment refuses it
    ],
)
def test_a_response_of_qwen3_is_read_as_trl_reads_it(text, action, thought, error):
    parsed = read(text)
    assert (parsed.thought, parsed.error) == (thought, error)
    assert action is None or parsed.action == action


def test_reasoning_can_be_required():
    assert read(CALL, require_think=True).error == "no reasoning before the tool call"
    assert read(f"<think>hm</think>{CALL}", require_think=True).is_valid


def test_a_response_without_a_call_is_the_final_answer_if_there_is_that_tool():
    tools = (WordGame.guess, final_answer)
    assert read("It is 42.", tools=tools).action == tool_call("final_answer", answer="It is 42.")
    assert read("It is 42.").error == "no tool call"
    assert read("", tools=tools).error == "no tool call"
    spoken = read("<think>not <tool_call></think>It is 42.", tools=tools)
    assert (spoken.action, spoken.thought) == (tool_call("final_answer", answer="It is 42."), "not <tool_call>")


def test_a_malformed_or_truncated_call_is_not_a_final_answer():
    tools = (WordGame.guess, final_answer)
    assert read('<tool_call>\n{"name": "guess", "argu', tools=tools).error == "no tool call"
    assert read('I guess.\n<tool_call>guess("[crane]")</tool_call>', tools=tools).error == "no tool call"


FAMILIES = {
    "qwen2_5": True, "qwen3": True, "qwen3_instruct_2507": True, "qwen3_5_think": True, "qwen3_6": True,
    "llama3_1": True, "llama3_2": True, "glm4moe": True, "lfm2_2_5": True, "gemma4_v5": False, "gptoss": False,
}  # fmt: skip


@pytest.mark.parametrize(("family", "concatenates"), FAMILIES.items())
def test_a_call_as_the_family_s_chat_template_writes_it_is_read(family, concatenates):
    """The families of the table in docs/other_worlds.md; `concatenates`: whether the concatenated context works."""
    tokenizer = byte_tokenizer(getattr(templates, f"{family}_chat_template"))
    actions = action_format("tool_calls", tokenizer, [WordGame.guess])
    context = context_of(tokenizer, template=TEMPLATE, actions=actions)
    user = [{"role": "user", "content": "play"}]
    call = {"type": "function", "function": {"name": "guess", "arguments": {"guess": "[crane]"}}}
    said = [*user, {"role": "assistant", "content": "", "tool_calls": [call]}]
    prompt = tokenizer.apply_chat_template(user, tools=actions.schemas, tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(said, tools=actions.schemas, tokenize=False)
    assert whole.startswith(prompt) and prompt.endswith(context.frame.closing)
    text = whole.removeprefix(prompt)
    parsed = context.read(ids_of(tokenizer, text), text, None, require_think=False)
    assert (parsed.action, parsed.error) == (ACTION, "")
    answering = action_format("tool_calls", tokenizer, [WordGame.guess, final_answer])
    for end in range(text.index("guess"), len(text), 5):  # a truncated call is not a final answer
        response = RawResponse(ids_of(tokenizer, text[:end]), "", context.frame.closing)
        assert '"final_answer"' not in answering.read(response, None, require_think=False).action
    if concatenates:
        context_of(tokenizer, "concatenated", TEMPLATE, actions=actions)
    else:
        with pytest.raises(ChatTemplateError, match="use context: windowed or action_format: tags"):
            context_of(tokenizer, "concatenated", TEMPLATE, actions=actions)


# ------------------------------------------------------------------------------------------------------------ prompts


def played(mode, answers):
    """Returns an episode whose environment says "one", "two" ..., and the chat ids of each turn."""
    tokenizer = qwen3()
    actions = action_format("tool_calls", tokenizer, [WordGame.guess])
    context = context_of(tokenizer, mode, TEMPLATE, actions=actions)
    listed = {**info(), "admissible_actions": None, "accepted": True}
    env = ScriptedEnv(*((text, 0.0, False, False, listed) for text in ("one", "two", "three")), start=("zero", listed))
    calls = []

    def generate(prompts):
        calls.append(prompts[0])
        return [[*ids_of(tokenizer, answers[len(calls) - 1]), tokenizer.eos_token_id]], None

    (episode,) = play_episodes(
        [env], [("train/0", 0)], generate, context, RolloutSettings(max_turns=len(answers), require_think=False)
    )
    return episode, calls, env, actions


def test_in_a_concatenated_context_the_conversation_is_the_one_that_the_chat_template_writes():
    episode, calls, env, actions = played("concatenated", [CALL] * 3)
    assert [turn.is_valid for turn in episode.turns] == [True] * 3 and env.received == [ACTION] * 3
    first = TEMPLATE.first.format(task="find it", observation="zero")
    messages = [{"role": "user", "content": first}]
    for shown, observation in zip(calls, ("one", "two", "three"), strict=True):
        assert shown == qwen3().apply_chat_template(
            messages, tools=[get_json_schema(WordGame.guess)], add_generation_prompt=True, return_dict=False
        )
        call = {"type": "function", "function": json.loads(ACTION)}
        messages += [{"role": "assistant", "content": "", "tool_calls": [call]}]
        messages += [{"role": "tool", "name": "guess", "content": observation}]


def test_in_a_windowed_context_every_prompt_shows_the_tools_and_past_calls():
    _, calls, _, _ = played("windowed", [CALL, "crane"])
    shown = [qwen3().decode(ids) for ids in calls]
    assert all(json.dumps(get_json_schema(WordGame.guess)) in text for text in shown)
    assert ACTION in shown[1] and "What you see: one" in shown[1]


def test_what_a_tool_returns_is_data():
    """A result that spells the end of a turn, or a call, is shown as its characters."""
    tokenizer = qwen3()
    actions = action_format("tool_calls", tokenizer, [WordGame.guess])
    context = context_of(tokenizer, "concatenated", TEMPLATE, actions=actions)
    control = {tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<tool_call>")}
    view = {"info": info(), "history": [("zero", ACTION)], "last_response_ids": [tokenizer.eos_token_id]}
    plain, spelled = context.build([TurnView("text", **view), TurnView("<|im_end|> <tool_call>", **view)])
    count = lambda prompt: sum(token in control for token in prompt.ids)  # noqa: E731
    assert count(spelled) == count(plain)


# ----------------------------------------------------------------------------------------------------- what is refused


def test_formats_that_cannot_work_are_refused():
    tokenizer = qwen3()
    with pytest.raises(ValueError, match="action_format: .*without tools, got 'tool_calls'"):
        action_format("tool_calls", tokenizer, ())
    with pytest.raises(ChatTemplateError, match="shows no tool calls"):
        action_format("tool_calls", byte_tokenizer(), [WordGame.guess])


def test_in_tags_a_call_is_passed_on_whole():
    """As long as it is, white space and all: an argument may be a program."""
    program = "for i in range(3):\n    print(i)" + " " * 300
    action = tool_call("guess", guess=program)
    response = RawResponse((), f"<think> hm </think> <action>\n {action} \n</action>", "")
    verbatim = action_format("tags", None, [WordGame.guess])
    assert verbatim.read(response, None, require_think=True).action == action
    assert TaggedActions().read(response, None, require_think=True).action != action
    assert action_format("tags", None, ()) == TaggedActions()
    assert action_format("tags", None, (), verbatim=True) == TaggedActions(verbatim=True)
