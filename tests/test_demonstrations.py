"""Expert turns as training examples: the prompts are those that the policy gets for the same play."""

import random
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from demonstrated_suites import TASKS, LineSuite, Recorded, play_like
from rollout_parts import LOSE, THINKING, WIN, byte_tokenizer, context_of, step
from trainer_kit import make_warm_start

from epo_trl.cli.imitation import DemonstrationArguments, check_length, switch_checkpointing
from epo_trl.cli.imitation import demonstrations as rows_of
from epo_trl.envs.toy import ToySuite
from epo_trl.models import build_tokenizer
from epo_trl.models.corpus import corpus
from epo_trl.rollout import PromptTemplate
from epo_trl.rollout.demonstrations import Demonstration, expert_episodes, play_expert
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


def test_rows_that_would_be_cut_off_are_refused():
    rows = Dataset.from_dict({"input_ids": [[1] * 3, [1] * 7, [1] * 5]})
    with pytest.raises(ValueError, match="max_length: expected 7 or more, got 4: 2 of 3 demonstrations"):
        check_length(rows, 4)
    with pytest.raises(ValueError, match="max_position_embeddings: expected 7 or more, got 6: 1 of 3"):
        check_length(rows, 6, "max_position_embeddings")
    check_length(rows, 7)
    check_length(rows, None)


def test_an_answer_does_not_repeat_the_tag_that_the_chat_template_writes():
    tokenizer = byte_tokenizer(THINKING)
    [[turn]] = expert_episodes(LineSuite([WIN]), [("a", 0)], context_of(tokenizer), max_turns=3)
    assert tokenizer.decode(turn.prompt_ids).endswith("<think>\n")
    assert tokenizer.decode(turn.response_ids[:-1]) == " I see start </think> <action> go </action>"


def test_thoughts_can_be_left_out(tokenizers):
    """And a policy that plays so is understood where no thought is asked for."""
    context = context_of(tokenizers["alfworld"])
    [[turn]] = expert_episodes(LineSuite([WIN]), [("a", 0)], context, max_turns=3, thoughts=False)
    answer = context.tokenizer.decode(turn.response_ids[:-1])
    assert answer == "<action> go </action>" and turn.response_ids[-1] == context.tokenizer.eos_token_id
    assert context.read(turn.response_ids, answer, ["go"], require_think=False).is_valid


def test_mistakes_are_played_and_not_taught(tokenizers):
    tokenizer, suite, tasks = tokenizers["compact"], Recorded(), [(f"train/{i}", i) for i in range(40)]
    context = context_of(tokenizer, template=PromptTemplate.load("compact"))
    won = []
    episodes = list(expert_episodes(suite, tasks, context, max_turns=30, mistake_rate=0.3, on_episode=won.append))
    assert all(won) and len(episodes) == 40  # the expert goes on after each

    pairs = [
        pair for said, played in zip(suite.said, suite.played, strict=True) for pair in zip(said, played, strict=True)
    ]
    mistakes = [(taught, played) for taught, (played, _) in pairs if taught != played]
    assert all(admissible == (taught == played) for taught, (played, admissible) in pairs)
    known = sum(len(said) - 1 for said in suite.said)  # nothing was admissible before the first turn
    assert 0.2 < len(mistakes) / known < 0.4

    after = 0
    for said, played, turns in zip(suite.said, suite.played, episodes, strict=True):
        for i, turn in enumerate(turns):
            assert tokenizer.decode(turn.response_ids).endswith(f"<action> {said[i]} </action> <|im_end|>")
            if i and played[i - 1][0] != said[i - 1]:
                after += 1
                prompt = tokenizer.decode(turn.prompt_ids)
                assert "nothing happens" in prompt and "<unk>" not in prompt
                assert f"{played[i - 1][0]} ;" in prompt  # the history shows what was done
    assert after == len(mistakes)


def test_mistakes_do_not_follow_the_random_choices_of_an_expert_with_the_same_seed():
    suite, erred = ToySuite(), {True: [], False: []}
    env = suite.make_env()
    for seed in range(400):
        start = env.reset(options={"task_id": f"train/{seed % 200}"})
        turns, _, _ = play_expert(suite, env, start, seed, 2, 0.3)
        erred[random.Random(seed).random() < 0.3].append(turns[1].played != turns[1].action)
    assert all(0.2 < sum(mistakes) / len(mistakes) < 0.4 for mistakes in erred.values())


def test_all_episodes_are_of_the_demonstrated_types(tokenizers):
    tokenizer = tokenizers["compact"]
    settings = {"prompt_template": "compact", "context": "concatenated", "max_turns": 7, "episodes": 30}
    shown = DemonstrationArguments(**settings, demonstrated_types=["visible"])
    rows = rows_of(ToySuite(), tokenizer, shown, 0)
    assert len(rows) == 30 and len({tuple(ids) for ids in rows["input_ids"]}) > 25  # few tasks have the same texts
    assert {labels.count(tokenizer.eos_token_id) for labels in rows["labels"]} == {2}  # a hidden one has more turns
    both = DemonstrationArguments(**{**settings, "episodes": 1}, demonstrated_types=["visible", "hidden"])
    assert len(rows_of(ToySuite(), tokenizer, both, 0)) == 1  # a type that the one episode lacks is known all the same
    with pytest.raises(ValueError, match=r"demonstrated_types: expected .*hidden, visible.*, got \['cook'\]"):
        rows_of(ToySuite(), tokenizer, DemonstrationArguments(**settings, demonstrated_types=["visible", "cook"]), 0)


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


def test_gradient_checkpointing_above_a_length_needs_no_newer_name_of_transformers():
    """Before activation_checkpointing existed, models had only gradient_checkpointing."""
    calls = []
    model = SimpleNamespace(
        gradient_checkpointing_enable=calls.append, gradient_checkpointing_disable=lambda: calls.append("off")
    )
    for on in (True, False):
        switch_checkpointing(model, on=on)
    assert calls == [{"use_reentrant": False}, "off"]
