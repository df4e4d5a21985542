"""A recipe without torch: `python study_recipe.py --config FILE` leaves behind what a trainer does, as its fields say.

Fields: `success` at each RL step, `entropy`, `fails` (text of an error), `seconds` to sleep, and what the study adds.
"""

import json
import sys
import time
from pathlib import Path

import yaml

FIELDS = {"success", "entropy", "fails", "seconds", "seed", "output_dir", "model_name_or_path", "max_steps",
          "resume_with_changes"}  # fmt: skip


def unknown(config):
    return sorted(set(yaml.safe_load(Path(config).read_text())) - FIELDS)


def main():
    if sys.argv[1] == "--check":
        wrong = [f"{config}: {name}: unknown" for config in sys.argv[2:] for name in unknown(config)]
        sys.exit("\n".join(wrong) if wrong else 0)
    given = yaml.safe_load(Path(sys.argv[2]).read_text())
    folder = Path(given["output_dir"])
    with open(folder / "starts.txt", "a") as file:
        file.write("x")
    if given.get("model_name_or_path"):
        (Path(given["model_name_or_path"]) / "starts.txt").read_text()  # it is there
    time.sleep(given.get("seconds", 0))
    if given.get("fails"):
        sys.exit(given["fails"])
    wins = [share + 0.01 * given["seed"] for share in given.get("success", [])]
    history = [{"step": step, "env/success_rate": won, "entropy/all_tokens": given.get("entropy", 1.0), "time/all": 3.0}
               for step, won in enumerate(wins, 1)]  # fmt: skip
    checkpoint = folder / f"checkpoint-{len(wins)}"
    checkpoint.mkdir(exist_ok=True)
    (checkpoint / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    (folder / "_finished.json").write_text(json.dumps({"settings": {}, "step": len(wins), "files": {}}))


if __name__ == "__main__":
    main()
