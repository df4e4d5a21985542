"""A saved model says what it is: no paper of others, no base called None, no question that no agent is asked."""

import json
import re

import pytest
import yaml
from peft import LoraConfig
from trainer_kit import make_ppo, make_trainer

from epo_trl.cli.imitation import DemonstrationArguments, ImitationTrainer
from epo_trl.envs.toy import ToySuite
from epo_trl.evaluation import EvalReport, get_protocol
from epo_trl.evaluation.report import REPORTS, TypeCount
from epo_trl.trainers.model_card import CARD, write_card

EPO = "[EPO, entropy-regularized policy optimization](https://arxiv.org/abs/2509.22576)"
GRPO, PPO = "[GRPO](https://arxiv.org/abs/2402.03300)", "[PPO](https://arxiv.org/abs/1707.06347)"
LORA = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")


def evaluation(folder, step, wins):
    """Writes the report of an evaluation of 20 episodes."""
    report = EvalReport(
        protocol=get_protocol("strict30"), suite="toy", split="iid", types={"find": TypeCount(20, wins)}, turns=60,
        invalid_turns=3, stop_reasons={"won": wins}, seconds=1.0,
    ).to_dict()  # fmt: skip
    (folder / REPORTS).mkdir(exist_ok=True)
    (folder / REPORTS / f"step_{step:06d}.json").write_text(json.dumps({"step": step, "reports": [report]}))


def card_of(folder):
    """Returns the metadata and the text of a card."""
    _, head, text = (folder / CARD).read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(head), text


def write_text(trainer, folder):
    folder.mkdir(exist_ok=True)
    write_card(trainer, folder)
    return card_of(folder)[1]


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
        assert not [words for words in ("DeepSeekMath", "[None]", "time machine", "question =") if words in text]
        assert "weight 0.001" in text and "`toy`" in text and "1 of 1" in text and "trained from scratch" in text
        assert "`strict30`: 30 turns, temperature 0.4, windowed context, 2 past turns in the prompt" in text
        assert "an answer ends with an action, as in `<action>look</action>`" in text
        # Wilson's interval of 2 of 20 at 95 %: 2.8 to 30.1
        assert "| 0 | iid | 10.0 % | 2.8 to 30.1 % | 20 | `strict30` on `toy` |" in text
        assert "base_model" not in data and {"trl", "epo_trl", "grpo"} <= set(data["tags"])


def test_results_are_those_up_to_the_model_s_own_step(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.state.global_step, trainer.state.max_steps = 20, 30
    assert "Not evaluated" in write_text(trainer, tmp_path)
    for step, wins in ((0, 2), (10, 5), (20, 10), (30, 20)):
        evaluation(tmp_path, step, wins)
    (tmp_path / REPORTS / "step_000020 (copy).json").write_text("{}")
    assert re.findall(r"^\| (\d+) \| iid", write_text(trainer, tmp_path), re.MULTILINE) == ["0", "20"]


@pytest.mark.parametrize(
    ("make", "settings", "cites"),
    [
        (make_trainer, {}, f"{GRPO}, {EPO}, "),
        (make_trainer, {"epo_lambda": 0.0}, f"{GRPO}, "),
        (make_ppo, {}, f"{PPO}, {EPO}, "),
        (make_ppo, {"epo_lambda": 0.0}, f"{PPO}, "),
    ],
)
def test_the_method_is_the_one_that_was_used(tmp_path, make, settings, cites):
    text = write_text(make(tmp_path, **settings), tmp_path)
    assert f"Please cite {cites}[TRL](https://github.com/huggingface/trl#citation), and" in text
    assert ("2509.22576" in text) == (EPO in cites)


def test_a_model_of_the_hub_is_linked_and_a_folder_is_not_taken_for_one(tmp_path, monkeypatch):
    trainer, folder = make_trainer(tmp_path / "run", peft_config=LORA), tmp_path / "run"
    trainer.model.config._name_or_path = "Qwen/Qwen2.5-0.5B-Instruct"
    text = write_text(trainer, folder)
    assert "[Qwen/Qwen2.5-0.5B-Instruct](https://huggingface.co/Qwen/Qwen2.5-0.5B-Instruct)" in text
    data = card_of(folder)[0]
    assert (data["base_model"], data["library_name"]) == ("Qwen/Qwen2.5-0.5B-Instruct", "peft")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "base").mkdir(parents=True)
    trainer.model.config._name_or_path = "runs/base"
    assert "`base`, a local folder" in write_text(trainer, folder)
    assert "base_model" not in card_of(folder)[0]


def test_an_adapter_s_card_is_ours_too(tmp_path):
    make_trainer(tmp_path, peft_config=LORA).save_model()
    text = card_of(tmp_path)[1]
    assert "a LoRA adapter on the base model" in text and "More Information Needed" not in text


def test_the_warm_start_says_that_it_is_imitation():
    trainer = ImitationTrainer.__new__(ImitationTrainer)
    trainer.suite, trainer.shown = ToySuite(), DemonstrationArguments(episodes=7)
    trainer.demonstrated = 12
    rows = trainer.card_rows()
    assert "imitation of a scripted expert" in rows["method"]
    assert rows["demonstrations"] == "12 turns, from 7 expert episodes of up to 50 turns"
    trainer.shown = DemonstrationArguments(episodes=7, context="concatenated")
    assert trainer.card_rows()["demonstrations"].startswith("12 episodes, from 7 expert episodes")
