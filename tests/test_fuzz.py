"""10,000 random and adversarial responses through parser, environments and packing: no exception, and right masks.

The parser is compared with one pattern for each block, which is quadratic; the masks with a walk through the turns.
"""

import random
import re
import time
from collections import Counter

import pytest
from rollout_parts import byte_tokenizer, context_of

from epo_trl.envs.alfworld import GeneratedAlfworld
from epo_trl.envs.toy import ToySuite
from epo_trl.rollout import RolloutSettings, episode_to_row, parse_response, play_episodes
from epo_trl.rollout.parsing import MAX_PASSED_CHARS
from epo_trl.types import StopReason

RESPONSES = 10_000
TURNS, EPISODES = 5, 40  # of one rollout
TAGS = ("<think>", "</think>", "<action>", "</action>")
ODD_TAGS = (
    "<ACTION>", "</ action>", "<action >", "<think/>", "<<action>>", "</action", "action>", "<act", "&lt;action&gt;",
)  # fmt: skip
SPECIAL = ("<|im_end|>", "<|im_start|>", "<pad>", "<s>", "<|endoftext|>", "<unk>")
INJECTIONS = (
    "go to drawer 1; quit", "look\nYou won the game!", "{observation}", "{task}{history[0]}", "%s%n", "../../etc",
    "quit", "reset", "0", "-1", "None", "__import__('os')", "red; red", "open *", "put coin in/on chest",
    "Your task is to: leave", "</action><action>look", "a" * 300, "\u202elook", "ＬＯＯＫ", "l\u0000ook", "İ", "ß",
)  # fmt: skip


def random_text(rng):
    """Returns text without any plan: bytes, unicode of all planes, lone surrogates left out, control characters."""
    kind = rng.randrange(4)
    length = rng.choice([0, 1, 5, 40])
    if kind == 0:
        return bytes(rng.randrange(256) for _ in range(length)).decode("utf-8", "replace")
    if kind == 1:
        return "".join(chr(rng.randrange(0x20)) for _ in range(length))
    if kind == 2:
        return "".join(chr(rng.choice([rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)])) for _ in range(length))
    return " ".join(rng.choice(["look", "go", "red", "take", "1", "\u00a0", "\t", "\n"]) for _ in range(length))


def adversarial_text(rng, actions):
    """Returns a shuffle of tags, near tags, special tokens, injections, admissible actions and noise."""
    pieces = [
        *TAGS, *TAGS, rng.choice(ODD_TAGS), rng.choice(SPECIAL), rng.choice(INJECTIONS), rng.choice(actions),
        random_text(rng),
    ]  # fmt: skip
    return rng.choice(["", " ", "\n"]).join(rng.choice(pieces) for _ in range(rng.choice([1, 3, 6, 12])))


def well_formed_text(rng, actions):
    """Returns a response that may be right, with something odd in the thought or the action."""
    thought = rng.choice([random_text(rng), "<action>", "<think>", rng.choice(INJECTIONS), "hm"])
    action = rng.choice([rng.choice(actions), rng.choice(actions).upper(), rng.choice(INJECTIONS), random_text(rng)])
    return f"<think>{thought}</think> <action> {action} </action>{rng.choice(['', random_text(rng), '<action>'])}"


def response(rng, actions):
    kind = rng.random()
    if kind < 0.005:
        return rng.choice([*TAGS, "x", " ", "<"]) * 500
    if kind < 0.2:
        return random_text(rng)
    return (adversarial_text if kind < 0.6 else well_formed_text)(rng, actions)


# --- Parser --------------------------------------------------------------------------------------------------------


def blocks(text, name):
    return list(re.finditer(rf"<{name}>(.*?)</{name}>", text, re.DOTALL | re.IGNORECASE | re.ASCII))


def squeezed(text):
    return " ".join(text.split())


def expected(text, admissible):
    """Returns the action and whether it is valid."""
    actions, thoughts = blocks(text, "action"), blocks(text, "think")
    if len(actions) != 1:
        return squeezed(text)[-MAX_PASSED_CHARS:], False
    action = squeezed(actions[0].group(1))
    thought_first = bool(thoughts) and thoughts[0].end() <= actions[0].start()
    if admissible is None:
        return action, bool(action) and thought_first
    same = [a for a in admissible if squeezed(a).lower() == action.lower()]
    return (same[-1], thought_first) if same else (action[-MAX_PASSED_CHARS:], False)


@pytest.mark.slow
def test_the_parser_reads_what_a_single_pattern_reads():
    rng, actions = random.Random(0), ("look", "go to drawer 1", "Take Mug 2")
    valid = 0
    for _ in range(RESPONSES):
        text = response(rng, actions)
        for admissible in (actions, None):
            parsed = parse_response(text, admissible)
            assert (parsed.action, parsed.is_valid) == expected(text, admissible), repr(text[:500])
        valid += parsed.is_valid
    assert RESPONSES / 10 < valid < RESPONSES * 0.9


@pytest.mark.parametrize("text", [*TAGS, "<think></think>", "<action></action>", "<action><think>", "x", " "])
def test_a_huge_response_takes_no_time(text):
    start = time.process_time()
    parse_response(text * 200_000, ("look",))
    assert time.process_time() - start < 10  # what is quadratic takes hours


# --- Environments and packing --------------------------------------------------------------------------------------


def check_row(episode, tokenizer):
    """Compares an episode's row with a walk through its turns, token by token."""
    row = episode_to_row(episode, tokenizer.eos_token_id)
    tokens = list(episode.turns[0].prompt_ids)
    mask, turns = [None] * len(tokens), [None] * len(tokens)
    for index, turn in enumerate(episode.turns):
        for token in turn.prompt_ids if index else ():
            tokens.append(token), mask.append(0), turns.append(index)
        for token in turn.response_ids:
            tokens.append(token), mask.append(1), turns.append(index)
    assert row.prompt_ids + row.completion_ids == tokens
    first = len(row.prompt_ids)
    assert (row.env_mask, row.turn_ids) == (mask[first:], turns[first:]) and None not in row.env_mask


def play_fuzzed(suite, rng, tokenizer, mode, actions, invalid_action):
    """Plays one rollout of fuzzed responses, checks its rows, and returns its episodes."""
    envs, sampled = [suite.make_env() for _ in range(EPISODES)], Counter()

    def generate(prompt_ids):
        ids = []
        for _ in prompt_ids:
            if rng.random() < 0.1:  # any tokens at all, special ones among them; never none
                ids.append([rng.randrange(len(tokenizer)) for _ in range(rng.choice([1, 2, 30]))])
            else:
                text = response(rng, actions)
                ids.append([*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id])
        sampled.update(map(tuple, ids))
        return ids, None

    tasks = [(rng.choice(suite.task_ids("train")), 0) for _ in range(EPISODES)]
    settings = RolloutSettings(max_turns=TURNS, invalid_action=invalid_action)
    context = context_of(tokenizer, mode, max_prompt_tokens=100_000)
    episodes = play_episodes(envs, tasks, generate, context, settings)
    assert Counter(turn.response_ids for episode in episodes for turn in episode.turns) == sampled
    for episode in episodes:
        assert episode.stop is not StopReason.ABORTED, episode.error
        check_row(episode, tokenizer)
    for env in envs:
        env.close()
    return episodes


SUITES = {
    "toy": (ToySuite(), ("look", "open red box", "go to chest", "take coin", "put coin into chest")),
    "alfworld": (GeneratedAlfworld(n_train=8), ("look", "inventory", "go to cabinet 1", "open drawer 1")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SUITES)
def test_environments_and_masks_stand_anything_that_is_said(name):
    suite, actions = SUITES[name]
    rng, tokenizer, turns, valid, rounds = random.Random(name), byte_tokenizer(), 0, 0, 0
    while turns < RESPONSES / len(SUITES):
        mode, invalid = ("windowed", "concatenated")[rounds % 2], ("pass", "skip")[rounds // 2 % 2]
        episodes = play_fuzzed(suite, rng, tokenizer, mode, actions, invalid)
        turns += sum(len(episode.turns) for episode in episodes)
        valid += sum(turn.is_valid for episode in episodes for turn in episode.turns)
        rounds += 1
    assert rounds >= 4 and 0 < valid < turns / 2
