"""What README and the tour show in Python runs, logs and leaves a model, on this machine."""

import json
import re
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import ModelConfig

from epo_trl.envs.trap import TrapSuite
from epo_trl.lab.plots import read_run
from epo_trl.models.load import load_policy

ROOT = Path(__file__).parents[1]
# Only sizes are changed.
TINY = {
    "per_device_train_batch_size=64, max_steps=60": (
        "per_device_train_batch_size=8, max_steps=1, eval_episodes=2, max_completion_length=12, use_cpu=True"
    ),
}
SMALLER = {
    "episodes=300": "episodes=24",
    "per_device_train_batch_size=32, max_steps=150": "per_device_train_batch_size=4, max_steps=2",
    "per_device_train_batch_size=64": "per_device_train_batch_size=8, eval_episodes=2, logging_steps=1",
    "max_steps=60": "max_steps=2",
}


def run_python(page, smaller):
    """Runs the one block of Python of a page at a smaller size; returns its names."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    for shown, small in smaller.items():
        assert code.count(shown) == 1, f"{page}: {shown} is gone; adapt the test"
        code = code.replace(shown, small)
    names = {}
    exec(compile(code, page, "exec"), names)
    return names


@pytest.mark.slow
def test_the_python_of_the_readme_trains_and_leaves_a_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for part in load_policy(ModelConfig("tiny"), TrapSuite(rooms=2), "general"):
        part.save_pretrained("runs/first/sft")
    trainer = run_python("README.md", TINY)["trainer"]
    assert trainer.state.global_step == 1
    assert [report.episodes for report in trainer.last_reports] == [2, 2]
    AutoModelForCausalLM.from_pretrained("runs/trap")


@pytest.mark.slow
def test_the_python_of_the_tour_trains_logs_evaluates_and_leaves_a_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run_python("docs/tour.md", SMALLER)
    warm_start, run = Path("runs/first/sft"), Path("runs/first/rl")
    assert names["trainer"].model.config.name_or_path == str(warm_start)
    steps, _ = read_run(run)["train/reward"]
    assert steps.tolist() == [1, 2] and {"eval/iid/success_rate", "eval/ood/success_rate"} <= read_run(run).keys()
    assert [report.episodes for report in names["trainer"].last_reports] == [2, 2]
    for step in (0, 2):
        assert json.loads((run / "evaluations" / f"step_{step:06d}.json").read_text())["step"] == step
    AutoModelForCausalLM.from_pretrained(run)
    vocabularies = [AutoTokenizer.from_pretrained(folder).get_vocab() for folder in (warm_start, run)]
    assert vocabularies[0] == vocabularies[1] and len(vocabularies[0]) < 1000
    assert "| 2 | iid |" in (run / "README.md").read_text()  # the card has the results of the evaluation before it
