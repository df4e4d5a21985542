"""Expert turns as training examples: the prompts are those that the policy gets for the same play."""

import random

import pytest
import torch
from demonstrated_suites import TASKS, LineSuite, play_like
from rollout_parts import LOSE, WIN, byte_tokenizer, context_of, step
from trainer_kit import make_warm_start

from epo_trl.envs.toy import ToySuite
from epo_trl.models import build_tokenizer
from epo_trl.models.corpus import corpus
from epo_trl.rollout import PromptTemplate
from epo_trl.rollout.demonstrations import Demonstration, expert_episodes
from epo_trl.types import StopReason


@pytest.fixture(scope="module")
def tokenizers():
    return {
        "alfworld": byte_tokenizer(),
        "react": byte_tokenizer(),
        "compact": build_tokenizer(corpus(ToySuite(), "compact")),
    }


@pytest.mark.parametrize("name", ["alfworld", "compact", "react"])
def test_prompts_and_answers_are_those_of_a_policy_that_plays_like_the_expert(tokenizers, name):
    """The history of "react" shows thoughts."""
    tokenizer, suite = tokenizers[name], ToySuite()
    context = context_of(tokenizer, template=PromptTemplate.load(name), history_length=1, max_prompt_tokens=5000)
    demonstrations = list(expert_episodes(suite, TASKS, context, max_turns=7))
    assert len(demonstrations) == len(TASKS)
    episodes, _ = play_like(suite, context, demonstrations)
    assert {episode.stop for episode in episodes} == {StopReason.WON}
    assert sum(episode.invalid_actions for episode in episodes) == 0
    played = [[(list(t.prompt_ids), list(t.response_ids)) for t in episode.turns] for episode in episodes]
    assert played == [[(turn.prompt_ids, turn.response_ids) for turn in episode] for episode in demonstrations]
    assert max(map(len, played)) > 2  # so that the window has moved


@pytest.mark.parametrize(("keep_lost", "lengths"), [(False, [2, 1]), (True, [2, 2, 1])])
def test_lost_episodes_may_be_kept_cut_and_too_long_ones_are_left_out_and_all_are_reported(
    tokenizers, keep_lost, lengths
):
    games = [[step(), WIN], [step(), LOSE], [step(truncated=True)], [step(), step(), WIN], [step(), step(), LOSE]]
    games.append([WIN])
    won, tasks = [], [("a", i) for i in range(6)]
    context = context_of(tokenizers["alfworld"])
    episodes = expert_episodes(
        LineSuite(*games), tasks, context, max_turns=2, keep_lost=keep_lost, on_episode=won.append
    )
    assert [len(episode) for episode in episodes] == lengths
    assert won == [True, False, False, False, False, True]


def test_turns_whose_prompt_does_not_fit_are_left_out(tokenizers):
    suite = LineSuite([step("far " * 300), step("near"), WIN])
    context = context_of(tokenizers["alfworld"], max_prompt_tokens=300)
    with pytest.warns(match="max_prompt_length: .* 1 of 3 turns"):
        [episode] = expert_episodes(suite, [("a", 0)], context, max_turns=3)
    assert len(episode) == 2


def test_labels_of_rate_0_are_the_answer_and_of_rate_1_everything():
    turn = Demonstration([1, 2, 3], [51, 52])
    assert turn.labels(0.0, random.Random(0)) == [-100, -100, -100, 51, 52]
    assert turn.labels(1.0, random.Random(0)) == [1, 2, 3, 51, 52]


def test_gradient_checkpointing_above_a_length_is_used_there_and_changes_no_weight(tmp_path):
    rows, used = [[3 + (i * k) % 7 for k in range(1, 5 + 6 * (i % 2))] for i in range(8)], []
    settings = {"per_device_train_batch_size": 1, "max_steps": 8, "gradient_checkpointing": False}
    plain = make_warm_start(tmp_path / "plain", rows, **settings)
    plain.train()
    some = make_warm_start(tmp_path / "some", rows, **settings, gradient_checkpointing_above=6)

    def note(model, args, kwargs):
        used.append((kwargs["input_ids"].shape[1], model.is_activation_checkpointing))

    some.model.register_forward_pre_hook(note, with_kwargs=True)
    some.train()
    assert sorted(used) == [(4, False)] * 4 + [(10, True)] * 4
    assert all(torch.equal(a, b) for a, b in zip(plain.model.parameters(), some.model.parameters(), strict=True))
