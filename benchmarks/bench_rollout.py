"""Time of a rollout of many turns: this package against TRL's own loop over tool calls, on the same model.

    python benchmarks/bench_rollout.py --turns 5 10 20
    python benchmarks/bench_rollout.py --turns 8 --episodes 16 --words 512 --real --rounds 1  # on a GPU

All play the same game, which answers every action with a text of the same length and never ends. A logits processor
forces all responses to the same tokens, so each run makes the same number of turns and of sampled tokens. TRL's
conversation begins with its description of the tool, ours with a task of as many tokens.

- TRL: `GRPOTrainer(environment_factory=...)`, which recomputes the whole conversation in every turn;
- ours, concatenated: the same conversation, with keys and values cached from turn to turn;
- ours, not kept: the same without that cache;
- ours, windowed: a separate prompt for every turn, with the last two turns.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import trl.chat_template_utils as templates
from bench_update import REAL, make_model
from datasets import Dataset
from harness import Work, measure, parser, table, trainer_settings, write
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from epo_trl.envs.base import TaskSuite, TextEnv
from epo_trl.trainers import EPOConfig, EPOTrainer, generation

RESPONSE = '<tool_call>\n{"name": "act", "arguments": {"action": "look"}}\n</tool_call><|im_end|>'
WAYS = ("TRL", "ours, concatenated", "ours, not kept", "ours, windowed")


def make_tokenizer(
    texts: Sequence[str] = (RESPONSE, "you see a drawer and a shelf ."),
    chat_template: str = templates.qwen3_chat_template,
    tags: Sequence[str] = (),
) -> PreTrainedTokenizerFast:
    """Trains a byte-level tokenizer that reads the texts in few tokens, and each of the tags in one."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = [AddedToken(name, special=True) for name in ("<pad>", "<|im_start|>", "<|im_end|>")]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([*texts] * 9, trainer)
    backend.add_tokens([AddedToken(tag, normalized=False) for tag in tags])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<|im_end|>", padding_side="left"
    )
    tokenizer.chat_template = chat_template
    return tokenizer


class Script(LogitsProcessor):
    """Forces on row i of a call the i-th response, or the first ones again."""

    def __init__(self, responses: list[list[int]]) -> None:
        self.responses, self.start = responses, -1

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Masks all tokens but one of each row."""
        self.start = input_ids.shape[1] if self.start < 0 else self.start
        place, forced = input_ids.shape[1] - self.start, torch.full_like(scores, float("-inf"))
        rows = (self.responses[row % len(self.responses)] for row in range(len(scores)))
        forced[range(len(scores)), [response[min(place, len(response) - 1)] for response in rows]] = 0.0
        return forced


def make_scripted_model(tokenizer: Any, sizes: dict[str, int], responses: Sequence[str]) -> Any:
    """Creates a model with these responses, whatever it is asked."""
    model = make_model({"vocab_size": len(tokenizer), **sizes})
    ids, generate = tokenizer(list(responses), add_special_tokens=False)["input_ids"], model.generate
    model.generate = lambda *args, **kwargs: generate(
        *args, **kwargs, logits_processor=LogitsProcessorList([Script(ids)])
    )
    return model


class Game(TextEnv):
    """Returns the same observation after every action."""

    def __init__(self, task: str, observation: str) -> None:
        self.task, self.observation = task, observation

    def _info(self) -> dict[str, Any]:
        known = {"admissible_actions": None, "accepted": True, "won": False}
        return {**known, "task": self.task, "task_type": "t", "task_id": "train/0"}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Starts."""
        return self.observation, self._info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Continues with the same observation."""
        return self.observation, 0.0, False, False, self._info()


class Games(TaskSuite):
    """A suite with one game."""

    name = "bench"
    splits = ("train",)

    def __init__(self, task: str, observation: str) -> None:
        self.made = task, observation

    def task_ids(self, split: str) -> list[str]:
        """Returns the only task id."""
        return ["train/0"]

    def make_env(self) -> Game:
        """Creates a game."""
        return Game(*self.made)


class Tool:
    """The game as TRL's tool environment. The benchmark sets `observation`."""

    observation = ""

    def reset(self, **_: Any) -> None:
        """Starts."""

    def act(self, action: str) -> str:
        """Takes an action in the game.

        Args:
            action: What to do.

        Returns:
            What one sees.
        """
        return self.observation


class SlowGame(Game):
    """A game that takes its time for an answer, without using the processor."""

    seconds = 0.0
    _due = 0.0

    def step_async(self, action: str) -> None:
        """Records when the answer is due."""
        self._due = time.perf_counter() + self.seconds
        super().step_async(action)

    def has_answer(self) -> bool:
        """Whether the answer is due."""
        return time.perf_counter() >= self._due

    def step_wait(self) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Waits until the answer is due."""
        time.sleep(max(0.0, self._due - time.perf_counter()))
        return super().step_wait()


class SlowGames(Games):
    """A suite of slow games."""

    def __init__(self, seconds: float) -> None:
        super().__init__("go on", "you see a drawer and a shelf . " * 4)
        self.seconds = seconds

    def make_env(self) -> SlowGame:
        """Creates a game."""
        game = SlowGame(*self.made)
        game.seconds = self.seconds
        return game


def task_as_long_as_a_tool(tokenizer: PreTrainedTokenizerFast, observation: str) -> str:
    """Returns a task text that makes our first prompt as long as TRL's, which describes the tool."""

    def length(text: str, **tools: Any) -> int:
        messages = [{"role": "user", "content": text}]
        return len(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **tools))

    task, needed = "", length(observation, tools=[Tool().act])
    while length(f"{task} {observation}") < needed:
        task += "a "
    return task


def make_template() -> str:
    """Creates a folder with short prompt templates."""
    folder = Path(tempfile.mkdtemp())
    for name, text in {
        "first": "{task} {observation}", "followup": "{observation}", "history": "{observation} {action}",
        "next": "{task} {history} {observation}",
    }.items():  # fmt: skip
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return str(folder)


def make(way: str, turns: int, episodes: int, words: int, sizes: dict[str, int]) -> Work:
    """Builds a benchmark of one rollout that returns the number of sampled tokens."""
    tokenizer = make_tokenizer()
    model = make_scripted_model(tokenizer, sizes, [RESPONSE])
    observation = " ".join(["you see a drawer and a shelf ."] * (words // 8))
    settings = trainer_settings(per_device_train_batch_size=episodes, num_generations=episodes, max_steps=1, beta=0.0)
    trainer: GRPOTrainer
    if way == "TRL":
        Tool.observation = observation
        config = GRPOConfig(**settings, max_tool_calling_iterations=turns - 1, max_completion_length=2**15)
        tasks = Dataset.from_dict({"prompt": [[{"role": "user", "content": observation}]] * 2})
        trainer = GRPOTrainer(
            model, lambda completions, **_: [0.0] * len(completions), config, tasks, processing_class=tokenizer,
            environment_factory=Tool,
        )  # fmt: skip
        inputs = [dict(tasks[0]) for _ in range(episodes)]
    else:
        config = EPOConfig(
            **settings, max_turns=turns, max_completion_length=len(tokenizer(RESPONSE)["input_ids"]),
            max_prompt_length=2**13, prompt_template=make_template(), require_think=False, history_length=2,
            context="windowed" if "windowed" in way else "concatenated",
        )  # fmt: skip
        if way == "ours, not kept":
            generation.can_reuse = lambda *args: False
        trainer = EPOTrainer(
            model,
            Games(task_as_long_as_a_tool(tokenizer, observation), observation),
            args=config,
            processing_class=tokenizer,
        )
        inputs = [{"prompt": "train/0"} for _ in range(episodes)]
    trainer.model.train()

    def work() -> tuple[int, int]:
        output = trainer._generate_and_score_completions([dict(row) for row in inputs])
        sampled = output["completion_mask"] * output["tool_mask"]
        return int(sampled.sum()), int(output["completion_mask"].sum() + output["prompt_mask"].sum())

    return work


def main() -> None:
    """Benchmarks all numbers of turns and prints a table."""
    args = parser(__doc__)
    args.add_argument("--turns", type=int, nargs="+", default=[5, 10])
    args.add_argument("--episodes", type=int, default=8)
    args.add_argument("--words", type=int, default=64, help="words of an observation")
    args.add_argument("--hidden", type=int, default=256)
    args.add_argument("--layers", type=int, default=4)
    args.add_argument("--real", action="store_true", help="the sizes of Qwen2.5-0.5B")
    given = args.parse_args()
    sizes = REAL if given.real else {
        "hidden_size": given.hidden, "intermediate_size": 4 * given.hidden, "num_hidden_layers": given.layers,
        "num_attention_heads": max(4, given.hidden // 64), "num_key_value_heads": max(2, given.hidden // 256),
    }  # fmt: skip
    rows, results = [], {}
    for turns in given.turns:
        work = {way: partial(make, way, turns, given.episodes, given.words, sizes) for way in WAYS}
        measured = results[turns] = measure(work, given.rounds)
        base = measured["TRL"].median
        for way, one in measured.items():
            sampled, total = one.results[-1]
            rows.append([
                turns, way, f"{one.median:.2f} s ± {one.spread / 2:.0%}", f"{base / one.median:.2f}x",
                f"{sampled / one.median:,.0f}", f"{sampled:,}", f"{total:,}",
            ])  # fmt: skip
    head = ["turns", "way", "rollout", "speed against TRL", "sampled tokens/s", "sampled tokens", "tokens in the rows"]
    print(table(head, rows))
    write(given.json, options=vars(given), results=results)


if __name__ == "__main__":
    main()
