"""Trains on vLLM with settings given as JSON and writes what was logged. Run by test_vllm.py, alone or by torchrun."""

import functools
import json
import os
import sys
from pathlib import Path

import torch
import vllm
import weights_without_nccl
from transformers import TrainerCallback

from epo_trl.envs.toy import ToySuite
from epo_trl.trainers import EPOConfig, EPOPPOConfig, EPOPPOTrainer, EPOTrainer


def count_cached_tokens(trainer: EPOTrainer) -> list[tuple[str, int]]:
    """Returns a list that gets, for every response, its episode and the prompt tokens that were not run again."""
    cached: list[tuple[str, int]] = []
    llm = trainer.vllm_generation.llm.llm_engine
    step = llm.step

    def counted():
        outputs = step()
        cached.extend((output.request_id, output.num_cached_tokens) for output in outputs if output.finished)
        return outputs

    llm.step = counted
    return cached


def pretend_to_sleep(trainer: EPOTrainer) -> list[str]:
    """Returns a list of what was asked of a vLLM that loses its weights in its sleep. No CPU build can sleep."""
    asked: list[str] = []
    vllm_generation = trainer.vllm_generation
    vllm_generation.enable_sleep_mode = vllm_generation._llm_weights_sleeping = True

    def sleep(level: int) -> None:
        asked.append(f"sleep {level}")
        vllm_generation.llm.apply_model(forget)
        vllm_generation.llm.reset_prefix_cache()

    vllm_generation.llm.sleep = sleep
    vllm_generation.llm.wake_up = lambda tags: asked.extend(tags)
    return asked


def forget(model: torch.nn.Module) -> None:
    """Sets the weights to 0."""
    for weight in model.parameters():
        weight.data.zero_()


class Kill(TrainerCallback):
    """Ends a process group at the first update."""

    def __init__(self, victim: int, folder: str) -> None:
        self.victim, self.mark = victim, Path(folder, "killed")

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if not self.mark.exists():
            os.killpg(self.victim, 9)
            self.mark.touch()


def main(policy: str, folder: str, settings: dict, kind: str, stale: bool, sleeping: bool, victim: int) -> None:
    """Trains three steps and evaluates."""
    import trl.generation.vllm_generation as backend

    weights_without_nccl.keep_linear_weights()
    weights_without_nccl.patch_client()
    backend.LLM = functools.partial(vllm.LLM, dtype="float32")  # TRL names no type; log-probabilities are to compare
    config, trainer_class = {"grpo": (EPOConfig, EPOTrainer), "ppo": (EPOPPOConfig, EPOPPOTrainer)}[kind]
    args = config(
        folder, use_cpu=True, bf16=False, use_vllm=True, vllm_max_model_length=1024, vllm_gpu_memory_utilization=0.1,
        per_device_train_batch_size=8, num_generations=4 if kind == "grpo" else 1, max_steps=3, learning_rate=1e-2,
        max_prompt_length=300, max_completion_length=8, temperature=0.8, prompt_template="compact", save_strategy="no",
        logging_steps=1, report_to=[], gradient_checkpointing=False, eval_episodes=4, disable_tqdm=True, **settings,
    )  # fmt: skip
    trainer = trainer_class(policy, ToySuite(), args=args)
    if victim and trainer.accelerator.is_main_process:
        trainer.add_callback(Kill(victim, folder))
    cached = count_cached_tokens(trainer) if args.vllm_mode == "colocate" else []
    asked = pretend_to_sleep(trainer) if sleeping else []
    if stale:
        trainer.vllm_generation.sync_weights = lambda: None
    trainer.train()
    metrics = trainer.evaluate()
    kept = {
        "steps": [log for log in trainer.state.log_history if "loss" in log],
        "eval_turns": metrics["eval_iid/turns"],
        "same_temperature": trainer.vllm_generation.temperature == args.temperature,
        "cached": cached,
        "asked": asked,
    }
    Path(folder, f"rank{trainer.accelerator.process_index}.json").write_text(json.dumps(kept))
    trainer.accelerator.wait_for_everyone()
    os._exit(0)  # vLLM's threads outlive the main one


if __name__ == "__main__":
    main(*sys.argv[1:3], **json.loads(sys.argv[3]))
