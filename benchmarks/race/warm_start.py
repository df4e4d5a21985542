"""Warm-starts the tiny model on expert episodes, in the format that all systems of the race play in.

    python benchmarks/race/warm_start.py --output runs/race/warm

An episode is one conversation. The agent answers each message with `<action> ... </action>`. After "The episode is
over." it answers nothing, since TRL's loop asks once more after the last action.
"""

import epo_trl.threads  # noqa: F401 - before torch

import argparse
import math
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from games import OVER, PROMPT, TEMPLATE, TURNS, make_suite

from epo_trl.models import build_model, build_tokenizer
from epo_trl.models.corpus import corpus
from epo_trl.models.muon import make_muon
from epo_trl.rollout import ContextBuilder
from epo_trl.rollout.demonstrations import Demonstration, expert_episodes

# A tool's answer is a message of the user, as in Qwen's chat template; a call to the tool `act` is a pair of tags.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + ('user' if message['role'] == 'tool' else message['role']) + ' ' -}}"
    "{{- message['content'] or '' -}}"
    "{%- if message['tool_calls'] -%}{%- for call in message['tool_calls'] -%}"
    "{%- set given = call['function']['arguments'] -%}{{- '<action> ' -}}"
    "{{- given['action'] if 'action' in given else call['function']['name'] + ' ' + given | tojson -}}"
    "{{- ' </action>' -}}"
    "{%- endfor -%}{%- endif -%}"
    "{{- '<|im_end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant ' -}}{%- endif -%}"
)


def with_end(turns: list[Demonstration], tokenizer: Any) -> list[Demonstration]:
    """Adds the message after the last action, and an empty answer."""
    text = f"<|im_start|>user {OVER}<|im_end|><|im_start|>assistant "
    last = Demonstration(tokenizer(text, add_special_tokens=False)["input_ids"], [tokenizer.eos_token_id])
    return [*turns, last]


def rows(episodes: list[list[Demonstration]], chance: random.Random) -> dict[str, torch.Tensor]:
    """Pads whole episodes: `input_ids`, `attention_mask` and `labels` (B, T)."""
    ids = [[i for turn in turns for i in turn.input_ids] for turns in episodes]
    labels = [[i for turn in turns for i in turn.labels(0.2, chance)] for turns in episodes]
    width = max(map(len, ids))
    return {
        "input_ids": torch.tensor([row + [0] * (width - len(row)) for row in ids]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids]),
        "labels": torch.tensor([row + [-100] * (width - len(row)) for row in labels]),
    }


def batches(episodes: list[list[Demonstration]], size: int, chance: random.Random) -> list[list[list[Demonstration]]]:
    """Splits the episodes, in random order, into batches of similar length."""
    drawn, made = chance.sample(episodes, len(episodes)), []
    for first in range(0, len(drawn), 32 * size):
        near = sorted(drawn[first : first + 32 * size], key=lambda turns: sum(len(turn.input_ids) for turn in turns))
        made += [near[i : i + size] for i in range(0, len(near), size)]
    return chance.sample(made, len(made))


def main() -> None:
    """Trains and saves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/race/warm"))
    parser.add_argument("--episodes", type=int, default=16000)
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--mistakes", type=float, default=0.3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    chance, suite = random.Random(args.seed), make_suite()
    tokenizer = build_tokenizer([*corpus(suite, PROMPT), OVER])
    tokenizer.chat_template = CHAT_TEMPLATE
    model = build_model(tokenizer, seed=args.seed).train()
    context = ContextBuilder(tokenizer, TEMPLATE, mode="concatenated")
    tasks = [(task, args.seed) for task in suite.task_ids("train")[: args.episodes]]
    played = expert_episodes(suite, tasks, context, max_turns=TURNS, mistake_rate=args.mistakes, thoughts=False)
    learned = ([replace(turn, is_learned=True) for turn in turns] for turns in played)
    episodes = [with_end(turns, tokenizer) for turns in learned]
    print(f"{len(episodes)} episodes, {sum(len(t.input_ids) for e in episodes for t in e):,} tokens", flush=True)
    optimizer = make_muon(model, lr=3e-3, matrix_lr=5e-3, betas=(0.9, 0.98), weight_decay=0.0)
    shape = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min(1.0, (i + 1) / 50) * 0.5 * (1 + math.cos(math.pi * i / args.steps))
    )
    start, order, tokens = time.process_time(), [], 0
    for step in range(args.steps):
        if not order:
            order = batches(episodes, args.batch, random.Random(f"{args.seed} {step}"))
        batch = rows(order.pop(), chance)
        tokens += int(batch["attention_mask"].sum())
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        shape.step()
        optimizer.zero_grad()
        if step % 50 == 49:
            seconds = time.process_time() - start
            print(f"step {step + 1}, loss {loss.item():.3f}, {tokens:,} tokens, {seconds:.0f} s of CPU", flush=True)
    model.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)


if __name__ == "__main__":
    main()
