"""One process of `same_weights.py`: trains every run with the epo_trl on its path and saves the weights.

python benchmarks/same_weights_worker.py {one,ddp,zero3} START FOLDER [RUN ...]

The first process also creates the models that the runs start from. It belongs to the older revision, and the newer one
reads its models. So of the newer revision only the trainers, their configs and the environments are called.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before torch is loaded

import safetensors.torch
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from corridor import CorridorSuite

import epo_trl
from epo_trl.envs.alfworld import GeneratedAlfworld
from epo_trl.envs.base import TaskSuite
from epo_trl.trainers import EPOConfig, EPOPPOConfig, EPOPPOTrainer, EPOTrainer

RL_STEPS = 10
GOOD_ENOUGH = {"alfworld": 0.03, "corridor": 0.1}  # loss at which a start model wins some of its games
COMMON: dict[str, Any] = {
    "num_generations": 4, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "steps_per_generation": 4,
    "num_iterations": 1, "learning_rate": 1e-3, "scale_rewards": "batch", "epo_lambda": 0.0, "smoothing_alpha": 0.5,
    "kappa_low": 0.9, "kappa_high": 1.1, "history_length": 2, "max_turns": 10, "max_prompt_length": 256,
    "max_completion_length": 20, "gradient_checkpointing": False, "use_cpu": True, "bf16": False,
    "save_strategy": "no", "logging_steps": 1, "report_to": [], "disable_tqdm": True, "seed": 1,
}  # fmt: skip
ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "alfworld": {"prompt_template": "compact"},
    "corridor": {"prompt_template": "corridor", "env_reward_weight": 0.5},
}
METHODS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "grpo-epo": {"epo_lambda": 0.05},
    "ppo": {"gamma": 0.95, "gae_lambda": 0.9, "bootstrap_truncated": True, "critic_learning_rate": 5e-3},
    "ppo-epo": {"gamma": 0.95, "gae_lambda": 0.9, "bootstrap_truncated": True, "epo_lambda": 0.05},
}
# Settings specific to one run. `num_iterations` and `steps_per_generation` make several updates of a batch.
OWN: dict[str, dict[str, Any]] = {
    "alfworld-grpo": {"scale_rewards": "group"},
    "alfworld-grpo-epo": {"num_iterations": 2},
    "alfworld-ppo": {"credit": "turn", "critic": "separate", "num_generations": 1},
    "alfworld-ppo-epo": {"credit": "token", "critic": "value_head", "num_iterations": 2, "entropy_history": "turn"},
    "corridor-grpo": {"beta": 0.05},
    "corridor-grpo-epo": {"steps_per_generation": 8, "entropy_history_window": 3, "loss_type": "dapo"},
    "corridor-ppo": {"credit": "outcome", "critic": "separate", "critic_warmup_steps": 2, "value_clip": None},
    "corridor-ppo-epo": {"credit": "turn", "critic": "separate", "num_generations": 1, "context": "concatenated"},
}
ZERO3: dict[str, Any] = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},  # shard tiny weights too
    "zero_allow_untested_optimizer": True,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}


def make_suite(environment: str) -> TaskSuite:
    """Creates a suite of a few short games."""
    if environment == "corridor":
        return CorridorSuite(3, move_limit=8)
    return GeneratedAlfworld(
        8, 1, 0, task_types=["pick_and_place_simple"], room_types=["bathrooms"], max_receptacles=10
    )


def make_start(environment: str, folder: Path) -> None:
    """Trains and saves a tiny model, with its tokenizer, half trained on the expert, so that rewards differ."""
    from epo_trl.models import build_model, build_tokenizer
    from epo_trl.models.load import corpus
    from epo_trl.rollout import ContextBuilder, PromptTemplate
    from epo_trl.rollout.demonstrations import expert_episodes

    suite, template = make_suite(environment), ENVIRONMENTS[environment]["prompt_template"]
    tokenizer = build_tokenizer(corpus(suite, template))
    model = build_model(tokenizer, hidden_size=48, heads=2, seed=0).train()
    context = ContextBuilder(tokenizer, PromptTemplate.load(template))
    tasks = [(task_id, 0) for task_id in suite.task_ids("train")[:8]]
    turns = [turn for episode in expert_episodes(suite, tasks, context, max_turns=10) for turn in episode]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(0)
    updates, loss = 0, torch.tensor(torch.inf)
    while loss > GOOD_ENOUGH[environment] and updates < 1000:
        rows = [turns[i] for i in torch.randint(len(turns), (8,)).tolist()]
        ids = [torch.tensor(turn.prompt_ids + turn.response_ids) for turn in rows]
        labels = [torch.tensor([-100] * len(turn.prompt_ids) + turn.response_ids) for turn in rows]
        loss = model(
            input_ids=torch.nn.utils.rnn.pad_sequence(ids, batch_first=True),
            labels=torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100),
        ).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        updates += 1
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{environment}: {len(turns)} turns of the expert, {updates} updates, loss {loss.item():.3f}", flush=True)


def train(run: str, mode: str, start: Path, folder: Path) -> None:
    """Trains one run and saves its weights and its log."""
    environment, method = run.split("-", 1)
    kind, config = (EPOPPOTrainer, EPOPPOConfig) if method.startswith("ppo") else (EPOTrainer, EPOConfig)
    settings = {**COMMON, **ENVIRONMENTS[environment], **METHODS[method], **OWN[run]}
    updates = settings["steps_per_generation"] * settings["num_iterations"] // settings["gradient_accumulation_steps"]
    if mode != "one":  # each process gets half of the batch
        settings["steps_per_generation"] //= 2
        settings["gradient_accumulation_steps"] //= 2
    deepspeed, output = ZERO3 if mode == "zero3" else None, str(folder / f"{run}-output")  # one folder for all ranks
    args = config(output, max_steps=RL_STEPS * updates, deepspeed=deepspeed, **settings)
    trainer = kind(str(start / environment), make_suite(environment), args=args)
    trainer.train()
    weights = all_weights(trainer.model)
    if trainer.accelerator.is_main_process:
        safetensors.torch.save_file(weights, folder / f"{run}.safetensors")
        (folder / f"{run}.json").write_text(json.dumps(trainer.state.log_history), encoding="utf-8")


def all_weights(model: Any) -> dict[str, torch.Tensor]:
    """Returns the weights; those of the critic are numbered, so that a renamed weight makes no difference.

    Collective under ZeRO-3.
    """
    named, policy, critic = dict(model.named_parameters()), {}, {}
    if any("ds_id" in vars(p) for p in named.values()):
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(named.values())):
            named = {name: p.detach().clone() for name, p in named.items()}
    for name, weight in named.items():
        if "critic" in name.split("."):
            critic[f"critic.{len(critic):03}"] = weight.detach().clone()
        else:
            policy[f"policy.{name}"] = weight.detach().clone()
    return policy | critic


def join(mode: str) -> int:
    """Joins the other process, if there is one, and returns the rank."""
    if mode == "one":
        return 0
    patience = timedelta(seconds=120)
    if mode == "zero3":
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # otherwise it is compiled for 38 s
        deepspeed.init_distributed("gloo", timeout=patience)
    else:
        dist.init_process_group("gloo", timeout=patience)
    return dist.get_rank()


def forget_the_run() -> None:
    """Frees the resources of a run in this process."""
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]
    gc.collect()


def main() -> None:
    """Trains the requested runs, or all."""
    mode, start, folder, *runs = sys.argv[1:]
    rank = join(mode)
    print(f"{mode}, epo_trl of {Path(epo_trl.__file__).parent}", flush=True)
    for environment in ENVIRONMENTS:
        if rank == 0 and not (Path(start) / environment).exists():
            make_start(environment, Path(start) / environment)
    if mode != "one":
        dist.barrier()
    for run in runs or OWN:
        train(run, mode, Path(start), Path(folder))
        print(f"{run} done", flush=True)
        if mode != "one":
            dist.barrier()
        forget_the_run()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # DeepSpeed sometimes aborts during interpreter shutdown, after all is done


if __name__ == "__main__":
    main()
