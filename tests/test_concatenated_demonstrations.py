"""Expert episodes in concatenated context: the tokens are those of a policy that plays the same episode."""

import json
import random

import pytest
from demonstrated_suites import TASKS, LineSuite, Recorded, play_like
from rollout_parts import THINKING, WIN, byte_tokenizer, context_of, step
from tokenizer_families import FAMILIES
from trainer_kit import make_model, toy_tokenizer
from trl import ModelConfig

from epo_trl.cli import imitation
from epo_trl.cli.imitation import DemonstrationArguments, ImitationConfig, demonstrations, imitate, training_examples
from epo_trl.envs.toy import ToySuite
from epo_trl.evaluation import Protocol
from epo_trl.evaluation.play import protocol_context
from epo_trl.models import build_tokenizer
from epo_trl.models.corpus import corpus
from epo_trl.models.load import end_ids_of
from epo_trl.rollout import PromptTemplate
from epo_trl.rollout.demonstrations import Demonstration, expert_episodes
from epo_trl.rollout.rows import episode_to_row
from epo_trl.rollout.spec import ResponseArguments


def gemma_chat():
    """Its end of sequence is not the end of a turn."""
    tokenizer = FAMILIES["gemma"]()
    tokenizer.eos_token = "</s>"
    return tokenizer


TOKENIZERS = {
    **{name: FAMILIES[name] for name in ("qwen", "llama3", "gemma", "glm", "harmony")},
    "gemma_chat": gemma_chat,
    "thinking": lambda: byte_tokenizer(THINKING),
    "tiny": lambda: build_tokenizer(corpus(ToySuite(), "general")),
}
ENDS = {"gemma_chat": ["</s>", "<end_of_turn>"], "glm": ["<|endoftext|>", "<|user|>"]}  # of the models' responses


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokens_are_equal_in_sft_in_rl_and_in_evaluation(name):
    tokenizer, suite, template = TOKENIZERS[name](), ToySuite(), PromptTemplate.load("general")
    ends = tokenizer.convert_tokens_to_ids(ENDS.get(name, [tokenizer.eos_token]))
    training = context_of(tokenizer, "concatenated", template=template, end_ids=ends)
    episodes = list(expert_episodes(suite, TASKS, training, max_turns=7))
    assert len(episodes) == len(TASKS) and max(map(len, episodes)) > 2
    assert {turn.response_ids[-1] for turns in episodes for turn in turns} == {ends[-1]}
    examples = training_examples(episodes, "concatenated")

    played, _ = play_like(suite, training, episodes)
    for episode, ids, labels in zip(played, examples["input_ids"], examples["labels"], strict=True):
        row = episode_to_row(episode, 0)
        assert row.prompt_ids + row.completion_ids == ids
        mask = [0] * len(row.prompt_ids) + row.env_mask
        assert labels == [i if sampled else -100 for i, sampled in zip(ids, mask, strict=True)]

    protocol = Protocol(name="t", max_turns=7, history_length=0, temperature=0.0, context="concatenated")
    evaluation = protocol_context(protocol, ResponseArguments(prompt_template="general"), suite, tokenizer)
    evaluation.end_ids = ends
    _, prompts = play_like(suite, evaluation, episodes)
    assert prompts and all(any(ids[: len(p)] == p for ids in examples["input_ids"]) for p in prompts)


@pytest.mark.parametrize(
    ("name", "ends", "taught"),
    [
        ("gemma_chat", ["</s>"], "</s>"),  # a base model, which does not end with the template's token
        ("gemma_chat", ["</s>", "<end_of_turn>"], "<end_of_turn>"),
        ("glm", ["<|endoftext|>", "<|user|>"], "<|user|>"),
        ("glm", ["<|endoftext|>"], "<|endoftext|>"),
    ],
)
def test_an_answer_ends_with_the_template_s_token_if_that_ends_a_response(name, ends, taught):
    tokenizer, suite = TOKENIZERS[name](), ToySuite()
    shown = DemonstrationArguments(episodes=2, max_turns=7, prompt_template="compact", context="concatenated")
    rows = demonstrations(suite, tokenizer, shown, 0, tokenizer.convert_tokens_to_ids(ends))
    assert len(rows) == 2 and {ids[-1] for ids in rows["labels"]} == {tokenizer.convert_tokens_to_ids(taught)}
    headers = {"glm": "<|user|>", "gemma_chat": "<start_of_turn>user"}[name]
    for ids, labels in zip(rows["input_ids"], rows["labels"], strict=True):
        ended = sum(label == ids[-1] for label in labels)
        assert tokenizer.decode(ids).count(headers) == ended + (taught == headers)


def test_the_ends_of_a_response_are_those_of_the_model(tmp_path, monkeypatch):
    model, tokenizer = make_model(), toy_tokenizer()
    model.config.eos_token_id = model.generation_config.eos_token_id = 5
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    expected = [tokenizer.eos_token_id, 5]
    args = ModelConfig(str(tmp_path))
    (tmp_path / "generation_config.json").unlink()
    assert end_ids_of(args, tokenizer) == expected
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    given = []
    monkeypatch.setattr(imitation, "demonstrations", lambda *words: given.append(words[-1]) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        imitate(ToySuite(), DemonstrationArguments(), ImitationConfig(str(tmp_path / "out"), use_cpu=True), args)
    assert given == [[*expected, 6]]
    assert end_ids_of(ModelConfig("tiny"), tokenizer) == expected[:1]


def test_a_mistake_is_shown_and_not_learned():
    """The next answer is learned after what the mistake led to."""
    tokenizer, suite = build_tokenizer(corpus(ToySuite(), "compact")), Recorded()
    context = context_of(tokenizer, "concatenated", template=PromptTemplate.load("compact"))
    tasks = [(f"train/{i}", i) for i in range(30)]
    episodes = list(expert_episodes(suite, tasks, context, max_turns=30, mistake_rate=0.3))
    mistakes = 0
    for said, played, turns in zip(suite.said, suite.played, episodes, strict=True):
        for taught, (action, _), turn in zip(said, played, turns, strict=True):
            assert tokenizer.decode(turn.response_ids).endswith(f"<action> {action} </action> <|im_end|>")
            assert turn.is_learned == (taught == action)
            mistakes += taught != action
    assert mistakes > 20


def test_labels_of_a_mistake_are_its_prompt_alone():
    turns = [Demonstration([1, 2], [51]), Demonstration([3], [52, 53], is_learned=False), Demonstration([4], [54])]
    assert [turn.labels(0.0, random.Random(0)) for turn in turns] == [[-100, -100, 51], [-100] * 3, [-100, 54]]
    assert turns[1].labels(1.0, random.Random(0)) == [3, -100, -100]
    rows = training_examples([turns], "concatenated")
    assert rows["input_ids"] == [[1, 2, 51, 3, 52, 53, 4, 54]]
    assert rows["labels"] == [[-100, -100, 51, -100, -100, -100, -100, 54]]
    assert training_examples([turns], "windowed")["input_ids"] == [[1, 2, 51], [3, 52, 53], [4, 54]]


@pytest.mark.parametrize("limit", ["max_prompt_tokens", "max_context_tokens"])
def test_an_episode_ends_where_the_policy_s_would(limit):
    """The third observation does not fit, and what comes after it would have another context."""
    suite = LineSuite([step(), step("far " * 300), step("near"), WIN])
    context = context_of(byte_tokenizer(), "concatenated", **{limit: 600})
    with pytest.warns(match="max_prompt_length: .* 2 of 4 turns"):
        [turns] = expert_episodes(suite, [("a", 0)], context, max_turns=4)
    assert len(turns) == 2
