"""A saved model says what it is: no paper of others, no base called None, no question that no agent is asked."""

import json
import re
from dataclasses import dataclass

import pytest
import yaml
from peft import LoraConfig
from trainer_kit import make_model, make_ppo, make_trainer, toy_tokenizer
from trl import SFTTrainer

from epo_trl.cli.imitation import DemonstrationArguments, ImitationTrainer
from epo_trl.envs.toy import ToySuite
from epo_trl.envs.trap import TrapSuite
from epo_trl.evaluation import EvalReport, get_protocol
from epo_trl.evaluation.report import TypeCount
from epo_trl.evaluation.report_files import REPORTS
from epo_trl.models import adapters
from epo_trl.trainers.model_card import CARD, citation, write_card


def report_of(wins):
    """Returns the report of an evaluation of 20 episodes."""
    return EvalReport(
        protocol=get_protocol("strict30"), suite="toy", split="iid", types={"find": TypeCount(20, wins)}, turns=60,
        invalid_turns=3, stop_reasons={"won": wins}, seconds=1.0,
    ).to_dict()  # fmt: skip


def evaluation(folder, step, wins):
    (folder / REPORTS).mkdir(exist_ok=True)
    text = json.dumps({"step": step, "reports": [report_of(wins)]})
    (folder / REPORTS / f"step_{step:06d}.json").write_text(text)


def card_of(folder):
    """Returns the metadata and the text of a card."""
    _, head, text = (folder / CARD).read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(head), text


FALSE = ("DeepSeekMath", "[None]", "time machine", "question =")


def test_checkpoint_and_final_folder_have_a_card_with_method_environment_protocol_and_results(tmp_path):
    trainer = make_trainer(
        tmp_path, max_steps=1, save_strategy="steps", save_steps=1, protocol="strict30", eval_episodes=1
    )
    trainer.evaluate()
    evaluation(tmp_path, 0, wins=2)  # in place of the trainer's own
    trainer.train()
    trainer.save_model()
    for folder in (tmp_path, tmp_path / "checkpoint-1"):
        data, text = card_of(folder)
        assert not [words for words in FALSE if words in text]
        assert "2509.22576" in text and "2402.03300" in text and "weight 0.001" in text
        assert "`toy`" in text and "1 of 1" in text and "none: trained from scratch" in text
        assert "`strict30`: 30 turns, temperature 0.4" in text
        # Wilson's interval of 2 of 20 at 95 %: 2.8 to 30.1
        assert "| 0 | iid | 10.0 % | 2.8 to 30.1 % | 20 | `strict30` on `toy` |" in text
        assert "base_model" not in data and {"trl", "epo_trl", "grpo"} <= set(data["tags"])


@pytest.mark.parametrize(
    ("mode", "prompt", "protocol"),
    [
        ("windowed", "A prompt is one user message", "windowed context, 2 past turns in the prompt"),
        ("concatenated", "An episode is one conversation", "concatenated context, the whole episode in the prompt"),
    ],
)
def test_the_code_of_a_card_plays_an_episode(mode, prompt, protocol, tmp_path, monkeypatch, capsys):
    trainer = make_trainer(tmp_path, context=mode)
    trainer.model.generation_config.eos_token_id = [trainer.processing_class.eos_token_id, 7]
    trainer.save_model()
    text = card_of(tmp_path)[1]
    assert prompt in text and protocol in text
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "card", "exec"), names := {})
    assert re.match(r"(True|False) \[", capsys.readouterr().out)
    assert names["context"].end_ids == trainer.model.generation_config.eos_token_id


def test_results_are_those_up_to_the_model_s_own_step_and_a_damaged_report_is_left_out(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.state.global_step, trainer.state.max_steps = 20, 30
    assert "Not evaluated" in write_text(trainer, tmp_path)
    for step, wins in ((0, 2), (10, 5), (20, 10), (30, 20)):
        evaluation(tmp_path, step, wins)
    steps = re.findall(r"^\| (\d+) \| iid", write_text(trainer, tmp_path), re.MULTILINE)
    assert steps == ["0", "20"]
    (tmp_path / REPORTS / "step_000020 (copy).json").write_text("{}")
    for damaged in ('{"reports": [{', "[]", '{"reports": 1}', json.dumps({"reports": [{**report_of(9), "types": []}]})):
        (tmp_path / REPORTS / "step_000020.json").write_text(damaged)
        assert re.findall(r"^\| (\d+) \| iid", write_text(trainer, tmp_path), re.MULTILINE) == ["0"]


def test_tags_are_kept_and_a_card_that_cannot_be_read_has_none(tmp_path):
    trainer = make_trainer(tmp_path)

    def tags(card):
        (tmp_path / CARD).write_bytes(card)
        write_card(trainer, tmp_path)
        return card_of(tmp_path)[0]["tags"]

    own = tags(b"")
    assert "trl" in own and tags(b"---\ntags: [1, mine]\n---\n") == sorted(["1", "mine", *own])
    for head in (b"a: [", b"- x", b"tags: {a: 1}", b"tags:", b"tags: caf\xe9"):
        assert tags(b"---\n" + head + b"\n---\n") == own


def write_text(trainer, folder):
    write_card(trainer, folder)
    return card_of(folder)[1]


@pytest.mark.parametrize(
    ("make", "settings", "names", "leaves_out"),
    [
        (make_trainer, {"epo_lambda": 0.0}, ["[GRPO]"], ["2509.22576"]),
        (make_ppo, {}, ["[PPO](https://arxiv.org/abs/1707.06347) with a critic and [EPO"], ["GRPO"]),
        (make_ppo, {"epo_lambda": 0.0}, ["[PPO]"], ["2509.22576"]),
    ],
)
def test_the_method_is_the_one_that_was_used(tmp_path, make, settings, names, leaves_out):
    text = write_text(make(tmp_path, **settings), tmp_path)
    assert all(name in text for name in names) and not [name for name in leaves_out if name in text]


def test_a_model_of_the_hub_is_linked_and_a_folder_is_not_taken_for_one(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path / "run", env_workers=0)
    trainer.model.config._name_or_path = "Qwen/Qwen2.5-0.5B-Instruct"
    (tmp_path / "run").mkdir(exist_ok=True)
    text = write_text(trainer, tmp_path / "run")
    assert "[Qwen/Qwen2.5-0.5B-Instruct](https://huggingface.co/Qwen/Qwen2.5-0.5B-Instruct)" in text
    assert card_of(tmp_path / "run")[0]["base_model"] == "Qwen/Qwen2.5-0.5B-Instruct"
    monkeypatch.chdir(tmp_path)
    adapters.save_whole(make_model(), toy_tokenizer(), tmp_path / "runs" / "base", "tiny")
    trainer.model.config._name_or_path = "runs/base"
    assert "`runs/base`, a local folder, made from `tiny`" in write_text(trainer, tmp_path / "run")
    assert "base_model" not in card_of(tmp_path / "run")[0]


def test_an_adapter_s_card_is_ours_too(tmp_path):
    trainer = make_trainer(tmp_path, peft_config=LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    trainer.save_model()
    data, text = card_of(tmp_path)
    assert data["library_name"] == "peft" and "a LoRA adapter on the base model" in text
    assert "More Information Needed" not in text


def test_an_adapter_on_a_model_of_the_hub_names_its_base_and_what_to_cite(tmp_path):
    trainer = make_trainer(tmp_path, peft_config=LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    trainer.model.config._name_or_path = "HuggingFaceTB/SmolLM2-135M-Instruct"
    text = write_text(trainer, tmp_path)
    data, _ = card_of(tmp_path)
    assert (data["base_model"], data["library_name"]) == ("HuggingFaceTB/SmolLM2-135M-Instruct", "peft")
    said = text.partition("## Citation")[2]
    assert "[EPO, entropy-regularized policy optimization](https://arxiv.org/abs/2509.22576)" in said
    assert "[GRPO](https://arxiv.org/abs/2402.03300)" in said
    assert said.count("@article{xu2025epo,") == 1


def test_what_was_not_used_is_not_cited():
    said = citation("[PPO](https://arxiv.org/abs/1707.06347) with a critic")
    assert said.startswith("Please cite the following works: [PPO](https://arxiv.org/abs/1707.06347), [TRL](")
    assert "EPO" not in said and "bibtex" not in said
    assert citation("imitation of a scripted expert").startswith("Please cite the following works: [TRL](")


def test_what_an_environment_says_stays_in_its_cell(tmp_path):
    suite = ToySuite()
    suite.settings = {"rooms": "a | b\n## c"}
    trainer = make_trainer(tmp_path, suite=suite)
    assert "rooms: `a \\| b ## c` |" in write_text(trainer, tmp_path)


@dataclass
class TimedSuite(ToySuite):
    move_limit: int = 30
    hint: str | None = "look"
    words: str = ""
    MAY_CHANGE = frozenset({"words"})


def test_the_code_of_a_card_makes_the_suite_of_the_training(tmp_path):
    suites = (TrapSuite(2), TimedSuite(7), TimedSuite(7, None), ToySuite())
    cards = [write_text(make_trainer(tmp_path, suite=suite, prompt_template="general"), tmp_path) for suite in suites]
    assert [re.search(r"^suite = (.*)$", card, re.MULTILINE)[1] for card in cards] == [
        "TrapSuite(rooms=2, doors=4, hatch=0.35, liking=None, move_limit=12)",
        "TimedSuite(move_limit=7, hint='look')  # with the other arguments of your training",
        "TimedSuite(move_limit=7, hint=None)  # with the other arguments of your training",
        "ToySuite()  # with the other arguments of your training",
    ]
    assert ", move_limit: `7`, hint: `None` |" in cards[2]


def test_the_warm_start_says_that_it_is_imitation():
    trainer = ImitationTrainer.__new__(ImitationTrainer)
    trainer.suite, trainer.shown = ToySuite(), DemonstrationArguments(episodes=7, demonstrated_types=["find"])
    trainer.demonstrated = 12
    facts = trainer.card_facts()
    assert "imitation of a scripted expert" in facts.method and issubclass(ImitationTrainer, SFTTrainer)
    assert facts.rows["demonstrations"] == "12 turns, from 7 expert episodes of up to 50 turns; task types: find"
    trainer.shown = DemonstrationArguments(episodes=7, context="concatenated")
    assert trainer.card_facts().rows["demonstrations"].startswith("12 episodes, from 7 expert episodes")
