"""What a training run keeps of its episodes: which ones, with tokens and entropies, and each once."""

import copy
import random

import pytest
import torch
from run_kit import MINI_BATCHES, resumable
from tokenizer_families import FAMILIES
from trainer_kit import make_config, make_episodes, make_model, make_trainer, settle_by_task, toy_tokenizer

from epo_trl.methods import Comm
from epo_trl.trainers.monitoring.episode_samples import UNFINISHED, EpisodeSamples, token_pieces
from epo_trl.watch.sample import Outcome, TurnTexts, choose, read_samples, sample_of, write_samples
from epo_trl.watch.source import find_samples, sample_file

# ------------------------------------------------------------------------------------------------------------- choice

PLAYED = [Outcome(0.0, True, 0), Outcome(10.0, True, 1), Outcome(0.0, True, 1), Outcome(5.0, False, 2),
          Outcome(10.0, True, 2), Outcome(1.0, True, 2), Outcome(-9.0, False, 2)]  # fmt: skip


def test_the_worst_of_the_best_ones_group_the_best_an_aborted_one_and_random_ones_are_kept():
    chosen = choose(PLAYED, 5, random.Random(0))
    assert list(chosen.items())[:3] == [(2, "worst"), (1, "best"), (3, "aborted")]
    assert list(chosen.values())[3:] == ["random", "random"] and len(chosen) == 5
    assert choose(PLAYED, 5, random.Random(0)) == chosen
    assert set(choose(PLAYED, 99, random.Random(0))) == set(range(7))
    assert choose(PLAYED, 1, random.Random(0)) == {2: "worst"} and choose(PLAYED, 0, random.Random(0)) == {}


def test_where_all_got_the_same_nothing_is_called_the_worst_and_draws_reach_everything():
    same = [Outcome(0.0, True)] * 6
    assert {why for seed in range(9) for why in choose(same, 3, random.Random(seed)).values()} == {"random"}
    assert {i for seed in range(50) for i in choose(same, 2, random.Random(seed))} == set(range(6))


# ------------------------------------------------------------------------------------------------------------- tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_the_pieces_of_a_response_are_one_for_each_token_and_together_its_text(family):
    tokenizer = FAMILIES[family]()
    for text in ("<think> go to drawer 3 </think>", "an ünfinished 🙂 smile, 漢字", "a\n\n b"):
        ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        for end in (len(ids), len(ids) - 3):  # which may be in the middle of a letter
            whole = tokenizer.decode(ids[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            pieces = token_pieces(tokenizer, ids[:end])
            joined = "".join(pieces)
            assert len(pieces) == end and (joined == whole or whole.endswith(UNFINISHED))
            assert joined.startswith(whole.rstrip(UNFINISHED))
    assert token_pieces(tokenizer, []) == []


# ------------------------------------------------------------------------------------------------------ a run's files


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"context": "concatenated", "max_prompt_length": 300},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 4, "max_steps": 2},
    ],
    ids=["windowed", "concatenated", "mini-batches"],
)
def test_each_token_has_the_entropy_that_a_forward_pass_of_the_policy_that_played_gives(tmp_path, changes):
    model = make_model()
    played_by = copy.deepcopy(model).eval()
    settings = {"max_steps": 1, "keep_episodes": 8, "temperature": 0.7}
    trainer = make_trainer(tmp_path, model=model, **settings | changes)
    trainer.train()
    samples = read_samples(sample_file(tmp_path, 1))
    assert len(samples) == 8 == len(trainer.last_episodes)
    tokenizer = trainer.processing_class
    for episode in trainer.last_episodes:
        [sample] = [s for s in samples if s.episode.turns == episode.without_tokens().turns]
        before = []
        for turn, text in zip(episode.turns, sample.texts, strict=True):
            prompt = [*(before if trainer.args.context == "concatenated" else []), *turn.prompt_ids]
            ids = [*prompt, *turn.response_ids]
            logits = played_by(torch.tensor([ids])).logits[0, len(prompt) - 1 : -1].double() / 0.7
            log_p = logits.log_softmax(-1)
            assert text.entropy == pytest.approx((-(log_p.exp() * log_p).sum(-1)).tolist(), abs=2e-3)
            assert "".join(text.tokens) == tokenizer.decode(turn.response_ids)
            assert text.prompt == tokenizer.decode(turn.prompt_ids)
            before = ids
    values = [value for sample in samples for text in sample.texts for value in text.entropy]
    assert max(values) - min(values) > 1


def lines_of(folder):
    return {path.name: path.read_text() for path in sorted((folder / "episodes").iterdir())}


@pytest.mark.slow
def test_a_run_that_goes_on_inside_an_rl_step_keeps_the_same_episodes_once(tmp_path):
    """An RL step is four optimizer steps here."""
    resumable(tmp_path, max_steps=4, **MINI_BATCHES).train()
    kept = lines_of(tmp_path)
    assert list(kept) == ["rl_step_000001.jsonl"] and kept["rl_step_000001.jsonl"].count("\n") == 4
    assert all(text.entropy for sample in find_samples(tmp_path) for text in sample.texts)
    for step in (1, 3):
        folder, checkpoint = tmp_path / str(step), str(tmp_path / f"checkpoint-{step}")
        resumable(folder, max_steps=4, **MINI_BATCHES).train(resume_from_checkpoint=checkpoint)
        assert lines_of(folder) == kept


def test_how_many_are_kept_and_when(tmp_path):
    make_trainer(tmp_path / "some", max_steps=4, keep_episodes=3, keep_episodes_steps=2).train()
    kept = {name: text.count("\n") for name, text in lines_of(tmp_path / "some").items()}
    assert kept == {"rl_step_000001.jsonl": 3, "rl_step_000003.jsonl": 3, "rl_step_000004.jsonl": 3}
    make_trainer(tmp_path / "none", max_steps=1, keep_episodes=0).train()
    assert not (tmp_path / "none" / "episodes").exists()


def begun(folder, ranks=None, episodes=None):
    """Returns what has chosen among episodes made by hand."""
    samples = EpisodeSamples(make_config(folder), toy_tokenizer(), ranks or Comm(), 4)
    samples.begin(episodes or make_episodes(), 0, 1)
    return samples


def test_a_long_run_keeps_episodes_of_a_fiftieth_of_its_rl_steps_and_of_the_last(tmp_path):
    samples, kept = begun(tmp_path), []
    for step in range(1000):
        samples.begin(make_episodes()[:1], step, 1000)
        kept += [step] * (samples.state()["rl_step"] == step)
    assert kept == [*range(0, 1000, 20), 999]


def test_two_ranks_keep_what_one_would(tmp_path):
    episodes = make_episodes()
    one = begun(tmp_path)
    one.end()
    whole = read_samples(sample_file(tmp_path, 1))
    sent, outcomes = [], [(episode.total_reward, episode.is_usable) for episode in episodes]
    for rank in (1, 0):
        gathered = iter(
            [lambda own: outcomes, lambda own, rank=rank: sent.append(own) or (own + sent[0]) * (rank == 0)]
        )
        ranks = Comm(gather=lambda own, gathered=gathered: next(gathered)(own), index=rank, count=2)
        half = begun(tmp_path / "two", ranks, episodes=episodes[4 * rank :][:4])
        half.end()
    assert read_samples(sample_file(tmp_path / "two", 1)) == sorted(whole, key=lambda s: s.group)
    assert {sample.group for sample in whole} == {0, 1}


def test_an_aborted_episode_is_kept_with_its_error_and_without_entropy(tmp_path):
    samples = begun(tmp_path)
    samples.add_entropy(range(8), torch.zeros(8, 40, dtype=torch.bool), torch.ones(8, 40))
    samples.end()
    [aborted] = [sample for sample in find_samples(tmp_path) if sample.why == "aborted"]
    assert aborted == find_samples(tmp_path)[0] and aborted.episode.stop == "aborted"
    assert {text.entropy for text in aborted.texts} == {()} and all(text.tokens for text in aborted.texts)


# -------------------------------------------------------------------------------------------------------------- files


def test_what_is_written_is_what_is_read(tmp_path):
    episode = settle_by_task(make_episodes())[2].without_tokens()
    texts = [TurnTexts("prompt\n\u2028", ("a", "\ud800"), (0.25, 1.0)) for _ in episode.turns]
    sample = sample_of(episode, texts, rl_step=3, why="worst", group=1)
    write_samples(tmp_path / "new" / "file.jsonl", [sample.to_dict()])
    assert read_samples(tmp_path / "new" / "file.jsonl") == [sample]
