"""How often a policy decides as the expert does on the expert's own episodes, by the verb of the expert's action.

    python benchmarks/expert_decisions.py runs/alfworld-plain/sft runs/alfworld-plain/grpo_epo --splits train ood

No comparison. The expert of `recipes/alfworld/sft_plain_cpu.yaml` plays without mistakes. In each turn the policy's
likeliest verb is compared with the expert's (teacher forcing, greedy). Where the expert takes, the object of the task
is in sight; where it goes on, there is mostly none to take. `episodes` counts those in which every token of every
answer agrees.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator

import torch
from trl import ModelConfig

from epo_trl.cli.imitation import DemonstrationArguments, ImitationConfig
from epo_trl.cli.options import parse_options, read_command_line
from epo_trl.envs.base import TaskSuite
from epo_trl.models import load_policy
from epo_trl.rollout.demonstrations import Demonstration, expert_episodes, few_shot_of

CONFIG = "alfworld/sft_plain_cpu"
OPENING = "<action>"  # the token before the verb


def answers(model: torch.nn.Module, turns: list[Demonstration]) -> Iterator[tuple[list[int], list[int]]]:
    """Yields the token ids of each answer in an episode, and those that the model finds likeliest in their places."""
    ids = [token for turn in turns for token in turn.input_ids]
    likeliest = model(torch.tensor([ids], device=model.device)).logits[0].argmax(-1).tolist()
    end = 0
    for turn in turns:
        start, end = end + len(turn.prompt_ids), end + len(turn.input_ids)
        yield turn.response_ids, likeliest[start - 1 : end - 1]


def count(suite: TaskSuite, shown: DemonstrationArguments, name: str, split: str, episodes: int) -> Counter[str]:
    """Counts decisions by the expert's verb, with the suffix " right" those that agree."""
    model, tokenizer = load_policy(ModelConfig(name), suite, shown.template_for(suite))
    context = shown.build_context(suite, tokenizer, few_shot_of(shown, suite), shown.context, shown.history_length)
    ids = list(suite.task_ids(split))
    tasks = [(ids[number * len(ids) // episodes], number) for number in range(episodes)]
    found: Counter[str] = Counter()
    opening = tokenizer.convert_tokens_to_ids(OPENING)
    with torch.inference_mode():
        for turns in expert_episodes(suite, tasks, context, max_turns=shown.max_turns, thoughts=shown.thoughts):
            agrees = True
            for expert, likeliest in answers(model, turns):
                place = expert.index(opening) + 1
                verb = tokenizer.decode([expert[place]])
                found.update([verb] + [f"{verb} right"] * (expert[place] == likeliest[place]))
                agrees &= expert == likeliest
            found.update(["episodes"] + ["episodes right"] * agrees)
    return found


def main() -> None:
    """Prints a line per model and list."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("models", nargs="+", help="models trained with the vocabulary of the config")
    options.add_argument("--splits", nargs="+", default=["train", "ood"])
    options.add_argument("--episodes", type=int, default=300)
    args = options.parse_args()
    line = read_command_line(["--config", CONFIG])
    suite, shown, *_ = parse_options(line, DemonstrationArguments, ImitationConfig, ModelConfig)
    for split in args.splits:
        for name in args.models:
            found = count(suite, shown, name, split, args.episodes)
            rates = (f"{key} {found[f'{key} right']}/{found[key]}" for key in ("take", "go", "episodes"))
            print(split, name, *rates, sep="  ", flush=True)


if __name__ == "__main__":
    main()
