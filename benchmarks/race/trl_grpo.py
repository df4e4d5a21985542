"""TRL's `GRPOTrainer(environment_factory=...)` in the race."""

from __future__ import annotations

from pathlib import Path

from clock import Clock, TickTrainer
from games import EPISODE_TOKENS, RESPONSE_TOKENS, TURNS, House, make_suite
from settings import trainer_settings
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from epo_trl.trainers import task_dataset

# A response is text with one call between tags; TRL's documentation of `response_template` describes the fields.
RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|> assistant",  # as the tiny tokenizer decodes it
    "fields": {
        "tool_calls": {
            "open": "<action>",
            "close_pattern": r"</action>\s*",
            "repeats": True,
            "content": "text",
            "transform": {"type": "function", "function": {"name": "act", "arguments": {"action": "{content}"}}},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}


def make_trainer(model: Path, folder: Path, seed: int) -> GRPOTrainer:
    """Builds the trainer.

    Args:
        model: The warm start.
        folder: Folder of the run.
        seed: Seed of the run.
    """
    suite = make_suite()
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.response_template = RESPONSE
    config = GRPOConfig(
        **trainer_settings(folder, seed),
        max_completion_length=EPISODE_TOKENS,
        max_tool_calling_iterations=TURNS,
        generation_kwargs={"max_new_tokens": RESPONSE_TOKENS},  # TRL's own limit is for the episode
    )
    return GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(model),
        train_dataset=task_dataset(suite, "train", prompt="", seed=seed),
        environment_factory=lambda: House(suite),
        args=config,
        processing_class=tokenizer,
    )


def race(model: Path, clock: Clock, seed: int) -> None:
    """Trains until the clock stops it."""
    trainer = make_trainer(model, clock.folder, seed)
    trainer.add_callback(TickTrainer(clock, lambda: [env.won for env in trainer.environments]))
    trainer.train()
