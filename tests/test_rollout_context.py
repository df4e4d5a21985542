"""What the policy is shown: compared, token by token, with what the chat template makes of the same messages."""

import re

import pytest
import trl.chat_template_utils as templates
from rollout_parts import (
    LLAMA,
    QWEN,
    STYLES,
    THINKING,
    ScriptedEnv,
    ScriptedPolicy,
    answer,
    build,
    byte_tokenizer,
    chat_ids,
    context_of,
    ids_of,
    info,
    step,
    view,
)

from epo_trl.rollout import ChatTemplateError, PromptTemplate, RolloutSettings, episode_to_row, play_episodes

PAST = (("saw one", "go"), ("saw two", "look"), ("saw three", "go"))
FIRST = "task: find it. see: here can: go, look"


@pytest.fixture(scope="module", params=STYLES)
def tokenizer(request):
    return byte_tokenizer(STYLES[request.param])


@pytest.fixture(scope="module")
def qwen():
    return byte_tokenizer(QWEN)


# --- Windowed ------------------------------------------------------------------------------------------------------


def test_the_first_prompt_is_the_chat_template_applied_to_one_message(tokenizer):
    assert build(context_of(tokenizer)).ids == chat_ids(tokenizer, FIRST)


def test_half_of_a_surrogate_pair_becomes_a_question_mark(tokenizer):
    context = context_of(tokenizer)
    assert build(context, observation="a \ud800 b").ids == build(context, observation="a ? b").ids


def test_a_later_windowed_prompt_is_the_chat_template_applied_to_one_message(tokenizer):
    # two turns of history by default, numbered from the start of the episode
    past = "(2 saw saw two did look)\n(3 saw saw three did go)"
    message = f"task: find it. 3 turns, last 2: {past}. Turn 4 see: here"
    assert build(context_of(tokenizer), PAST).ids == chat_ids(tokenizer, message)


@pytest.mark.parametrize(
    ("length", "shown"),
    [
        (0, "last 0: . Turn"),
        (1, "last 1: (3 saw saw three did go). Turn"),
        (9, "last 3: (1 saw saw one did go)\n(2 saw saw two did look)\n(3 saw saw three did go). Turn"),
    ],
)
def test_the_window_shows_the_last_turns_and_no_other(qwen, length, shown):
    prompt = build(context_of(qwen, history_length=length), PAST)
    text = qwen.decode(prompt.ids)
    assert shown in text
    assert text.count("saw saw") == min(length, 3)
    assert prompt.dropped_turns == 0  # left out by the window, not for want of room


def test_a_prompt_that_is_too_long_loses_its_oldest_turns_first(qwen):
    short = [build(context_of(qwen, history_length=n), PAST).ids for n in range(4)]
    for kept in (3, 2, 1, 0):
        limit = len(short[kept])
        exact = build(context_of(qwen, history_length=3, max_prompt_tokens=limit), PAST)
        assert (exact.ids, exact.dropped_turns) == (short[kept], 3 - kept)
        assert "task: find it." in qwen.decode(exact.ids)
        if kept:
            below = build(context_of(qwen, history_length=3, max_prompt_tokens=limit - 1), PAST)
            assert (below.ids, below.dropped_turns) == (short[kept - 1], 4 - kept)


def test_prompts_of_a_batch_do_not_depend_on_each_other(qwen):
    context = context_of(qwen, max_prompt_tokens=len(build(context_of(qwen, history_length=1), PAST).ids))
    views = [view(), view(PAST), view(observation="far " * 400)]
    assert context.build(views) == [context.build([one])[0] for one in views]
    assert context.build(views)[2] is None
    assert [prompt.dropped_turns for prompt in context.build(views)[:2]] == [0, 1]


# --- White space and BOS -------------------------------------------------------------------------------------------


def test_messages_begin_and_end_without_white_space_as_a_template_that_trims_would_have_it():
    words = PromptTemplate(
        "spaces",
        first=" \n {task} {observation}\n",
        next="\t{task} {history} {observation} ",
        history="{action}",
        followup="\n{observation}",
    )
    for chat_template in (LLAMA, QWEN):  # the first trims, the second does not
        tokenizer = byte_tokenizer(chat_template)
        context = context_of(tokenizer, template=words)
        assert build(context, observation="here \n").ids == chat_ids(tokenizer, "find it here")
        assert build(context, PAST[:1], "here \n").ids == chat_ids(tokenizer, "find it go here")
        grown = build(context_of(tokenizer, "concatenated", words), PAST[:1], "\nhere \n")
        whole = chat_ids(tokenizer, "x", "y", "here")
        assert whole[-len(grown.ids) :] == grown.ids


def test_a_tokenizer_that_adds_bos_gives_one_bos():
    tokenizer = byte_tokenizer(LLAMA, adds_bos=True)
    bos = tokenizer.bos_token_id
    assert tokenizer("hi")["input_ids"][0] == bos and bos not in ids_of(tokenizer, "hi")  # it does add one
    windowed, grown = context_of(tokenizer), context_of(tokenizer, "concatenated")
    for ids in (build(windowed).ids, build(windowed, PAST).ids, build(grown).ids):
        assert ids[0] == bos
        assert ids.count(bos) == 1
    assert build(grown, PAST).ids.count(bos) == 0
    assert build(windowed).ids == chat_ids(tokenizer, FIRST)


# --- Concatenated --------------------------------------------------------------------------------------------------


def play_one(tokenizer, responses, observations=("one", "two"), **kwargs):
    """Returns the episode, its whole sequence as ids, and the prompts that the policy got."""
    env = ScriptedEnv(*[step(text) for text in observations], start=("here", info()))
    policy = ScriptedPolicy(tokenizer, [[response] for response in responses])
    context = context_of(tokenizer, "concatenated", **kwargs)
    [episode] = play_episodes([env], [("t", 0)], policy, context, RolloutSettings(max_turns=len(responses)))
    row = episode_to_row(episode, tokenizer.eos_token_id)
    return episode, row.prompt_ids + row.completion_ids, [call[0] for call in policy.calls]


CONVERSATION = [FIRST, answer("go"), "see: one can: go, look", answer("look"), "see: two can: go, look"]


def test_a_concatenated_episode_is_what_the_chat_template_makes_of_the_conversation(tokenizer):
    _, whole, prompts = play_one(tokenizer, [answer("go"), answer("look"), answer("go")])
    assert prompts == [chat_ids(tokenizer, *CONVERSATION[:n]) for n in (1, 3, 5)]
    assert whole == prompts[2] + [*ids_of(tokenizer, answer("go")), tokenizer.eos_token_id]


def test_sampled_ids_are_kept_though_they_are_not_what_the_tokenizer_would_make_of_their_text(tokenizer):
    text = answer("go", thought="I see a drawer 3 .")
    letters = [i for letter in text for i in ids_of(tokenizer, letter)] + [tokenizer.eos_token_id]
    assert tokenizer.decode(letters, skip_special_tokens=True) == text
    assert len(letters) > len(ids_of(tokenizer, text)) + 1  # it does not survive decoding and tokenising
    episode, whole, prompts = play_one(tokenizer, [letters, answer("look")])
    assert list(episode.turns[0].response_ids) == letters
    assert episode.turns[0].is_valid
    first = chat_ids(tokenizer, FIRST)
    assert prompts[1][: len(first) + len(letters)] == first + letters
    assert whole[: len(prompts[1])] == prompts[1]


def test_a_response_that_was_cut_gets_the_end_of_turn_as_a_token_of_the_environment(tokenizer):
    end = tokenizer.eos_token_id
    cut = ids_of(tokenizer, answer("go"))
    episode, _, prompts = play_one(tokenizer, [cut, answer("look"), answer("go")])
    assert prompts[2] == chat_ids(tokenizer, *CONVERSATION)  # the same conversation as if it had ended by itself
    assert [turn.response_ids[-1] == end for turn in episode.turns] == [False, True, True]
    assert [turn.prompt_ids[0] == end for turn in episode.turns] == [False, True, False]
    row = episode_to_row(episode, 0)
    assert row.completion_ids[len(cut)] == end and row.env_mask[len(cut)] == 0


def ending_tokenizer(closing, *, eos):
    """Returns a tokenizer whose template closes an answer with these tokens."""
    marks = ["<|stop|>", "<|done|>", "<|return|>"]
    template = QWEN.replace(
        "<|im_end|>\n' }}", "' + ('<|im_end|>' if m['role'] == 'user' else '" + closing + "') + '\n' }}"
    )
    tokenizer = byte_tokenizer(template, special=marks)
    tokenizer.eos_token = eos
    return tokenizer


@pytest.mark.parametrize(
    ("closing", "eos", "said", "appended"),
    [
        ("<|stop|><|done|>", "<|done|>", "<|stop|><|done|>", ""),  # Command R7B
        ("<|stop|><|done|>", "<|done|>", "<|stop|>", "<|done|>"),  # cut between the two
        ("<|stop|><|done|>", "<|done|>", "", "<|stop|><|done|>"),
        ("<|stop|><|done|>", "<|done|>", "<|return|>", ""),  # another token that ends a response of this model
        ("<|done|>", "<|return|>", "<|return|>", ""),  # gpt-oss
        ("<|done|>", "<|return|>", "", "<|done|>"),
        (" <|done|>", "<|done|>", "<|done|>", ""),  # Llama 2
        (" <|done|>", "<|done|>", "", " <|done|>"),
        ("<|done|>", "<|done|>", "<|stop|>", "<|done|>"),  # ends nothing here
    ],
)
def test_an_answer_is_closed_once(closing, eos, said, appended):
    tokenizer = ending_tokenizer(closing, eos=eos)
    context = context_of(tokenizer, "concatenated")
    context.end_ids = tokenizer.convert_tokens_to_ids([eos, "<|return|>"])
    response = ids_of(tokenizer, answer("go") + said)
    grown = build(context, PAST[:1], last_response_ids=response).ids
    assert tokenizer.decode(grown).startswith(appended + "\n<|im_start|>user\nsee: here")
    assert ids_of(tokenizer, appended) == grown[: len(ids_of(tokenizer, appended))]


def test_the_sequence_may_grow_to_its_limit_with_room_for_one_more_response(qwen):
    prompt = build(context_of(qwen, "concatenated"), PAST, context_tokens=100)
    assert prompt.dropped_turns == 0, "it holds no history"
    need = 100 + len(prompt.ids) + 7
    for limit, fits in ((need, True), (need - 1, False)):
        context = context_of(qwen, "concatenated", max_context_tokens=limit, max_response_tokens=7)
        assert (build(context, PAST, context_tokens=100) is not None) == fits


# --- Chat templates ------------------------------------------------------------------------------------------------

PLAIN = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + m['content'] + '<|im_end|>' }}{% endfor %}"


@pytest.mark.parametrize(
    ("chat_template", "message"),
    [
        (None, "chat_template is not set"),
        ("{{ messages[-1]['content'] }}<|im_end|>", "exactly once.*'userstart': 0"),  # drops the history
        (PLAIN.replace("messages", "messages | reverse"), "in order"),
        (
            "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ raise_exception('users only') }}{% endif %}"
            "{{ m['content'] }}{% endfor %}",
            "user, assistant, user, assistant, user: users only",
        ),
        ("{% for m in messages %}[Round {{ loop.index }}]{{ m['content'] }}{% endfor %}", "same text around a message"),
    ],
)  # fmt: skip
def test_a_chat_template_that_does_not_fit_is_an_error_that_says_why(chat_template, message):
    tokenizer = byte_tokenizer(chat_template)
    for mode in ("windowed", "concatenated"):
        with pytest.raises(ChatTemplateError, match=f"(?s)processing_class: .*{message}"):
            context_of(tokenizer, mode)


def test_chat_template_arguments_reach_the_template(qwen):
    tokenizer = byte_tokenizer(PLAIN + "{% if quiet %}<|im_start|>assistant{% endif %}")
    prompt = build(context_of(tokenizer, chat_template_kwargs={"quiet": True}))
    assert prompt.ids == chat_ids(tokenizer, FIRST, quiet=True) != chat_ids(tokenizer, FIRST)


@pytest.mark.parametrize(
    ("family", "dated"), [("llama3_2", "Today Date: 26 Jul 2024"), ("gptoss", "Current date: 2024-07-26")]
)
def test_prompts_are_the_same_every_day(family, dated):
    tokenizer = byte_tokenizer(getattr(templates, f"{family}_chat_template"))
    opening = context_of(tokenizer).frame.opening
    today = tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
    label = dated.split(": ")[0]
    assert dated in opening.splitlines()
    assert re.sub(f"{label}: .*", dated, today).startswith(opening)  # nothing else is changed
    if family == "llama3_2":
        chosen = context_of(tokenizer, chat_template_kwargs={"date_string": "1 Jan 2001"})
        assert chosen.frame.opening == opening.replace("26 Jul 2024", "1 Jan 2001")


def test_a_chat_template_may_open_the_reasoning_of_every_answer():
    tokenizer = byte_tokenizer(THINKING)
    assert context_of(tokenizer).answer_start == "<think>"
    responses = [text.removeprefix("<think>") for text in (answer("go"), answer("look"))]
    episode, _, prompts = play_one(tokenizer, responses)
    assert [(turn.is_valid, turn.action) for turn in episode.turns] == [(True, "go"), (True, "look")]
    assert [turn.response for turn in episode.turns] == responses
    # the sampled reasoning stays in the context, although the template would cut it out
    assert tokenizer.decode(prompts[1]).endswith(
        "<|im_start|>assistant\n<think>\n hm </think> <action> go </action><|im_end|>\n"
        "<|im_start|>user\nsee: one can: go, look<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )


def test_tags_that_decoding_drops_are_an_error():
    tokenizer = byte_tokenizer(special=("<think>", "</action>"))
    with pytest.raises(ChatTemplateError, match="decoding loses <think>, </action>"):
        context_of(tokenizer)
