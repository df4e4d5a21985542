"""The method of recipes/my_method, to which CONTRIBUTING.md points: by hand, and in a run of the recipe."""

import json
from pathlib import Path

import forked
import pytest

from epo_trl.methods import Comm, StepSummary
from epo_trl.types import Episode, StopReason, Turn

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "recipes" / "my_method"


@pytest.fixture
def no_repeats(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    from my_method import NoRepeats

    return NoRepeats


def episode(*tried):
    turns = (Turn((1,), (2,), "", seen, action, True, 1.0) for seen, action in tried)
    return Episode("train/0", "", "", tuple(turns), StopReason.TURN_LIMIT)


def test_a_turn_pays_for_what_it_has_tried_in_the_same_place(no_repeats):
    method = no_repeats(0.25)
    tried = [("hall", "look"), ("hall", "open door"), ("hall", "look"), ("garden", "look"), ("hall", "look")]
    assert method.turn_rewards(episode(*tried)) == [1.0, 1.0, 0.75, 1.0, 0.75]
    assert method.turn_rewards(episode(("hall", "look"))) == [1.0], "another episode has tried nothing yet"
    twice = StepSummary(0.0, {}, Comm(sum=lambda counts: 2 * counts))
    assert method.end_rl_step(twice) == {"no_repeats/share": pytest.approx(2 / 6)}
    assert method.end_rl_step(twice) == {"no_repeats/share": 0.0}


@pytest.mark.slow
def test_the_recipe_runs_with_it(tmp_path):
    command = [
        ROOT / "recipes" / "alfworld_grpo_epo.py", "--config", ROOT / "recipes" / "alfworld" / "tiny_cpu.yaml",
        "--policy_method", "my_method:NoRepeats", "--method_kwargs", '{"my_method:NoRepeats": {"penalty": 0.1}}',
        "--output_dir", tmp_path / "run", "--max_steps", "2", "--max_turns", "3", "--gradient_accumulation_steps", "1",
        "--model_name_or_path", "tiny", "--from_scratch",
        "--n_train", "8", "--n_iid", "2", "--n_ood", "2", "--report_to", "none", "--eval_strategy", "no",
    ]  # fmt: skip
    done = forked.run(command, cwd=FOLDER, log=tmp_path / "log.txt")
    assert done.returncode == 0, done.stdout[-3000:]
    (state,) = tmp_path.rglob("trainer_state.json")
    shares = [line["no_repeats/share"] for line in json.loads(state.read_text())["log_history"] if "loss" in line]
    assert len(shares) == 2 and all(0 <= share <= 1 for share in shares)
