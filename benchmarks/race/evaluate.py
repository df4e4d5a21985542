"""Plays the fixed test games with the checkpoints of a race, all by the same code.

    python benchmarks/race/evaluate.py runs/race/trl_grpo-0 runs/race/ours_grpo-0 ...

Every checkpoint, and the warm start, plays the same 100 games twice, at most 15 turns, sampled at temperature 1. The
result is `test.json` in each folder.
"""

import epo_trl.threads  # noqa: F401 - before torch

import argparse
import json
from pathlib import Path

from games import PROMPT, RESPONSE_TOKENS, TURNS, make_suite
from transformers import AutoModelForCausalLM, AutoTokenizer

from epo_trl.evaluation import Protocol
from epo_trl.evaluation.play import play_chunks, protocol_context, protocol_settings
from epo_trl.models.generate import SamplingPolicy
from epo_trl.rollout.spec import ResponseArguments

PROTOCOL = Protocol(name="race", max_turns=TURNS, history_length=0, temperature=1.0, context="concatenated")


def play(folder: Path, rounds: int) -> dict[str, float]:
    """Returns the number of games, those won, and the mean number of turns."""
    suite, tokenizer = make_suite(), AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    policy = SamplingPolicy(model, tokenizer, max_new_tokens=RESPONSE_TOKENS, temperature=1.0, reuse_prefixes=True)
    options = ResponseArguments(
        prompt_template=PROMPT, max_prompt_length=512, max_completion_length=RESPONSE_TOKENS, require_think=False
    )
    context = protocol_context(PROTOCOL, options, suite, tokenizer)
    tasks = list(suite.task_ids("iid"))
    rules = protocol_settings(PROTOCOL, require_think=options.require_think)
    played = play_chunks(suite, [tasks] * rounds, lambda number: policy.seeded(number), context, rules)
    episodes = [episode for part, _ in played for episode in part]
    return {
        "games": len(episodes),
        "won": sum(episode.won for episode in episodes),
        "turns": sum(len(episode.turns) for episode in episodes) / len(episodes),
    }


def main() -> None:
    """Plays what has not been played."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    for folder in args.folders:
        for model in [folder] if (folder / "config.json").is_file() else sorted(folder.glob("at-*")):
            if not (model / "test.json").is_file():
                found = play(model, args.rounds)
                (model / "test.json").write_text(json.dumps(found), encoding="utf-8")
            print(model, (model / "test.json").read_text(encoding="utf-8"), flush=True)


if __name__ == "__main__":
    main()
