"""What the README shows in Python runs, logs and leaves a model, on this machine."""

import json
import re
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from epo_trl.lab.plots import read_run

README = (Path(__file__).parents[1] / "README.md").read_text()
(BLOCK,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
# Only sizes are changed.
SMALLER = {
    "episodes=300": "episodes=24",
    "per_device_train_batch_size=32, max_steps=150": "per_device_train_batch_size=4, max_steps=2",
    "per_device_train_batch_size=64": "per_device_train_batch_size=8, eval_episodes=2, logging_steps=1",
    "max_steps=60": "max_steps=2",
}


@pytest.mark.slow
def test_the_python_of_the_readme_trains_logs_evaluates_and_leaves_a_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = BLOCK
    for shown, small in SMALLER.items():
        assert code.count(shown) == 1, f"README.md: {shown} is gone; adapt the test"
        code = code.replace(shown, small)
    names = {}
    exec(compile(code, "README.md", "exec"), names)
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
