"""What the tests of the trainer share: a small trainer, episodes made by hand, one optimizer step caught in the act."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import trl.trainer.utils as trl_utils
from datasets import Dataset
from torch import Tensor
from transformers import TrainerCallback
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from epo_trl.cli.imitation import DemonstrationArguments, ImitationConfig, ImitationTrainer
from epo_trl.envs.toy import ToySuite
from epo_trl.methods import Batch, Credit
from epo_trl.methods.epo import EPO
from epo_trl.models import build_model, build_tokenizer
from epo_trl.models.corpus import corpus
from epo_trl.trainers import EPOConfig, EPOPPOConfig, EPOPPOTrainer, EPOTrainer
from epo_trl.types import Episode, StopReason, Turn

ROWS = 8  # episodes of one RL step
GROUP = 4
USE_CPU = True  # False in tests/device
_TOKENIZERS: dict[str, Any] = {}


def toy_tokenizer(template: str = "compact") -> Any:
    if template not in _TOKENIZERS:
        _TOKENIZERS[template] = build_tokenizer(corpus(ToySuite(), template))
    return _TOKENIZERS[template]


def make_config(folder: Path | str, *, kind: type = EPOConfig, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "per_device_train_batch_size": ROWS,
        "num_generations": GROUP,
        "max_steps": 10,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.0,
        "max_completion_length": 6,
        "max_prompt_length": 200,
        "max_turns": 3,
        "prompt_template": "compact",
        "eval_episodes": 4,
        "save_strategy": "no",
        "logging_steps": 1,
        "gradient_checkpointing": False,
        "use_cpu": USE_CPU,
        "bf16": False,
        "report_to": [],
        "disable_tqdm": True,
    }
    return kind(str(folder), **{**settings, **changes})


def make_model(family: str = "llama", *, seed: int = 0, sharpness: float = 12.0, **sizes: Any) -> Any:
    """Returns a tiny model whose distributions differ from token to token (fresh weights are nearly uniform)."""
    model = build_model(toy_tokenizer(), family=family, seed=seed, **{"hidden_size": 32, "heads": 2, **sizes})
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(sharpness)
    return model


def saved(model: Any, folder: Path | str) -> Any:
    """Returns the model as loaded from a folder, where a reference model can be loaded from too."""
    model.save_pretrained(folder)  # by rank 0
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    return type(model).from_pretrained(folder)


def make_trainer(folder: Path | str, *, model: Any = None, suite: Any = None, **changes: Any) -> EPOTrainer:
    return _trainer(EPOTrainer, EPOConfig, folder, model, suite, changes)


def make_ppo(folder: Path | str, *, model: Any = None, suite: Any = None, **changes: Any) -> EPOPPOTrainer:
    """Returns a PPO trainer that bootstraps, whose critic's head is not zero, so that values differ."""
    defaults = {"num_generations": 1, "bootstrap_truncated": True}
    trainer = _trainer(EPOPPOTrainer, EPOPPOConfig, folder, model, suite, {**defaults, **changes})
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        for head in filter(None, (trainer.critic.head, trainer.critic.token_head)):
            head.weight.copy_(torch.randn(head.weight.shape))  # the same on every device
    return trainer


def make_warm_start(folder: Path | str, rows: list[list[int]], **changes: Any) -> ImitationTrainer:
    """Returns a trainer that imitates rows of tokens, four in a step."""
    settings = {"max_steps": 2, "save_steps": 1, "per_device_train_batch_size": 4, "report_to": [], **changes}
    return ImitationTrainer(
        ToySuite(),
        DemonstrationArguments(),
        model=make_model(),
        args=ImitationConfig(str(folder), use_cpu=USE_CPU, bf16=False, disable_tqdm=True, **settings),
        train_dataset=Dataset.from_dict({"input_ids": rows, "labels": rows}),
        processing_class=toy_tokenizer(),
    )


def _trainer(trainer: type, config: type, folder: Path | str, model: Any, suite: Any, changes: dict[str, Any]) -> Any:
    names = ("callbacks", "reward_funcs", "train_dataset", "peft_config", "optimizers", "tools", "eval_dataset")
    names += ("rollout_func", "environment_factory")
    kwargs = {name: changes.pop(name) for name in names if name in changes}
    if model is None:
        model = make_model()
        if "ref-nucleus" in (changes.get("entropy_method") or ()) or changes.get("credit") == "archer":
            model = saved(model, Path(folder) / "start")
    return trainer(
        model,
        suite if suite is not None else ToySuite(),
        args=make_config(folder, kind=config, **changes),
        processing_class=toy_tokenizer(),
        **kwargs,
    )


# ------------------------------------------------------------------------------------------------- episodes by hand


def make_episode(
    lengths: Sequence[tuple[int, int]], reward: float, rng: random.Random, *, stop: StopReason = StopReason.TURN_LIMIT
) -> Episode:
    """Returns an episode of random tokens; `lengths` are those of prompt and response of each turn."""

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(8, 60) for _ in range(count))

    turns = [
        Turn(tokens(prompt), tokens(response), "", "", "", True, reward * (i == len(lengths) - 1), env_reward=float(i))
        for i, (prompt, response) in enumerate(lengths)
    ]
    return Episode("train/0", "", "", tuple(turns), stop, won=reward > 5 and stop is StopReason.WON)


def make_episodes(seed: int = 0) -> list[Episode]:
    """Returns two groups of four episodes of one to four turns; one is aborted in its second turn."""
    rng = random.Random(seed)
    lengths = [
        [(5, 3), (4, 1), (6, 4)],
        [(5, 2)],
        [(5, 4), (3, 2), (2, 5), (4, 1)],
        [(5, 1), (7, 3)],
        [(9, 2), (4, 4)],
        [(9, 5), (4, 1)],  # aborted
        [(9, 1)],
        [(9, 3), (1, 1), (8, 2)],
    ]
    rewards = [10.0, -0.1, 0.0, 9.8, -0.3, 5.0, 10.0, 0.0]
    return [
        make_episode(
            turns,
            reward,
            rng,
            stop=StopReason.ABORTED if i == 5 else StopReason.WON if reward > 5 else StopReason.TURN_LIMIT,
        )
        for i, (turns, reward) in enumerate(zip(lengths, rewards, strict=True))
    ]


def with_episodes(trainer: Any, episodes: Sequence[Episode] | None = None) -> Any:
    """Lets the trainer "play" these episodes, or those made by hand; returns it."""
    trainer.play = lambda tasks, **kwargs: make_episodes() if episodes is None else list(episodes)
    return trainer


def results_of(owner: Any, name: str) -> list[Any]:
    """Returns a list that gets what a method of the object returns from now on."""
    results: list[Any] = []
    method = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: results.append(method(*args, **kwargs)) or results[-1])
    return results


def with_step(trainer: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns TRL's batch of all rows of an RL step, with the tensors that the step keeps of them."""
    step, own = trainer.step, {"turn_ids": trainer.step.layout.turn_ids, "num_episodes": trainer.step.num_episodes}
    own |= step.annotations.get("ref-nucleus", {})
    if (targets := step.targets) is not None:
        own |= {"old_values": targets.values, "returns": targets.returns, "value_points": targets.points}
    return {**batch, **own}


def batches_of(trainer: Any) -> list[dict[str, Tensor]]:
    """Returns a list that gets the batch of each RL step from now on, as `with_step` does."""
    batches: list[dict[str, Tensor]] = []
    method = trainer._generate_and_score_completions

    def keep(inputs):
        batch = method(inputs)
        batches.append(with_step(trainer, batch))
        return batch

    trainer._generate_and_score_completions = keep
    return batches


def one_batch() -> list[dict[str, str]]:
    """Returns the rows of an RL step, as from a dataset: TRL writes into them."""
    return [{"prompt": f"train/{i // GROUP}"} for i in range(ROWS)]


def collected(trainer: Any) -> dict[str, Tensor]:
    """Returns TRL's batch of an RL step, for one call of `compute_loss`."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return with_step(trainer, trainer._generate_and_score_completions(one_batch()))


def settle_by_task(episodes: Sequence[Episode]) -> list[Episode]:
    """Returns the episodes with an outcome by the number of their task: odd, every other one is won; even, none is."""
    made = []
    for i, episode in enumerate(episodes):
        won = bool(int(episode.task_id.split("/")[1]) % 2 and i % 2)
        turns = (*episode.turns[:-1], replace(episode.turns[-1], reward=10.0 * won))
        made.append(replace(episode, turns=turns, won=won, stop=StopReason.WON if won else StopReason.TURN_LIMIT))
    return made


def give_credit(trainer: Any, advantages: Callable[[Batch], Tensor]) -> None:
    """Lets the trainer's credit be what a function of the batch returns, (B, T)."""
    trainer.methods[trainer.args.credit].credit = lambda batch: Credit(advantages(batch))


# -------------------------------------------------------------------------------------------------- one caught step


class KeepGradients(TrainerCallback):
    """Keeps the gradients of the first optimizer steps and stops the run after them."""

    def __init__(self, steps: int = 1) -> None:
        self.steps = steps
        self.gradients: list[dict[str, Tensor]] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.gradients.append({name: p.grad.detach().clone() for name, p in trained.items()})

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.steps


def catch_step(trainer: Any, *, history: Sequence[float] = (), rl_step: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns loss and gradients of the first optimizer step of `trainer.train()`."""
    if history:  # a trainer of TRL's has none
        trainer.rl_step = rl_step
        for method in trainer.methods.values():
            for entropy in history if isinstance(method, EPO) else ():
                method.history.append(entropy)
    keep = KeepGradients()
    trainer.add_callback(keep)
    losses = results_of(trainer, "training_step")
    trainer.train()
    assert len(losses) == trainer.args.gradient_accumulation_steps
    (gradients,) = keep.gradients
    return torch.stack(losses).sum(), gradients


def assert_same_function(model: Any, got: Tensor, wanted: Tensor) -> None:
    """Checks values `(rows, tokens)` of a model's tokens and their gradients by all weights, each token's its own."""
    torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-5)
    names, parameters = zip(*model.named_parameters(), strict=True)
    slope = torch.arange(1.0, got.numel() + 1).view_as(got)
    mine, theirs = (
        torch.autograd.grad((x * slope).sum(), parameters, allow_unused=True, materialize_grads=True)
        for x in (got, wanted)
    )
    scale = max(float(x.abs().max()) for x in theirs)
    for name, x, y in zip(names, mine, theirs, strict=True):
        assert (x - y).abs().max() < 1e-4 * scale, name


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Returns the largest absolute difference between two sets of gradients."""
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def largest(gradients: dict[str, Tensor]) -> float:
    return max(float(gradient.abs().max()) for gradient in gradients.values())


# ------------------------------------------------------------------------------------------------ float64 throughout


class _ExactHead:
    """TRL's fused head in plain torch operations: TRL's own keeps its statistics and gradients in float32."""

    @staticmethod
    def apply(hidden, weight, bias, targets, temperature, chunk_size, softcap, scale, outputs):
        logits = hidden @ weight.t() * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        log_p = (logits / temperature).log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1) if "entropy" in outputs else None
        return log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1), entropy, None, None, None


def _exact_norm(self, hidden: Tensor) -> Tensor:
    return self.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


def _exact_rotation(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    angles = position_ids[..., None].double() * self.inv_freq.double()
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def compute_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the places where a Llama in float64 and TRL's head go through float32."""
    monkeypatch.setattr(trl_utils, "_ChunkedLogProbFunction", _ExactHead)
    monkeypatch.setattr(LlamaRMSNorm, "forward", _exact_norm)
    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", _exact_rotation)
