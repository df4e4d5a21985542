"""Tokenizers with chat templates of real families, models whose responses are given, and servers with seats."""

import time

import pytest
import trl.chat_template_utils as templates
from bench_rollout import make_scripted_model, make_tokenizer
from rollout_parts import answer
from trainer_kit import make_config
from trl import GRPOConfig, GRPOTrainer

from epo_trl.envs import EnvError
from epo_trl.trainers import EPOTrainer


def chat_tokenizer(texts, chat_template=templates.qwen3_chat_template):
    """Returns a tokenizer with a chat template of a real family, which reads the texts in few tokens."""
    return make_tokenizer(texts, chat_template, tags=("<tool_call>", "</tool_call>"))


def scripted_model(tokenizer, responses):
    """Returns a tiny model that says the responses, whatever it is asked."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    ended = [text + tokenizer.eos_token for text in responses]
    return make_scripted_model(tokenizer, {**sizes, "num_key_value_heads": 2}, ended)


def check_training(folder, suite, actions, **changes):
    """Trains for two steps on groups that take each of these three actions, one of which wins."""
    said = [answer(action) for action in actions]
    tokenizer = chat_tokenizer(["You are an agent that acts in a world described in text", *said])
    model = scripted_model(tokenizer, said)
    config = make_config(
        folder, per_device_train_batch_size=3, num_generations=3, max_steps=2, max_turns=1, max_prompt_length=1024,
        max_completion_length=80, **changes,
    )  # fmt: skip
    trainer = EPOTrainer(model, suite, args=config, processing_class=tokenizer)
    before = [value.detach().clone() for value in model.parameters()]
    trainer.train()
    trainer.close_envs()
    logged = [line["env/success_rate"] for line in trainer.state.log_history if "reward" in line]
    assert logged == pytest.approx([1 / 3] * 2)
    assert any((value != old).any() for value, old in zip(model.parameters(), before, strict=True))


def train_with_trl(folder, model, tokenizer, calls, **parts):
    """Returns TRL's own trainer after two steps with so many tool calls an episode, and the lines of its log."""
    args = GRPOConfig(
        str(folder), per_device_train_batch_size=4, num_generations=4, max_steps=2, learning_rate=1e-2,
        max_completion_length=1024, max_tool_calling_iterations=calls, use_cpu=True, bf16=False, report_to=[],
        logging_steps=1, save_strategy="no", disable_tqdm=True, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = GRPOTrainer(model, args=args, processing_class=tokenizer, **parts)
    trainer.train()
    return trainer, [line for line in trainer.state.log_history if "reward" in line]


def wait_for_seat(suite, seconds):
    """Starts an episode as soon as there is a seat, and leaves it."""
    for _ in range(seconds * 5):
        env = suite.make_env()
        try:
            env.reset(options={"task_id": "train/0"})
        except EnvError as error:
            assert "CAPACITY_REACHED" in str(error)
            time.sleep(0.2)
        else:
            env.close()
            return
    raise AssertionError("no seat became free")
