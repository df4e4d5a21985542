"""PPO with a critic over many turns (arXiv 1707.06347), on top of EPOTrainer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from trl import GRPOTrainer
from trl.trainer.callbacks import SyncRefModelCallback

from epo_trl.envs.base import TaskSuite
from epo_trl.errors import InputError
from epo_trl.methods import Batch, CriticValues, MicroBatch, TokenScores
from epo_trl.models.critic import (
    CRITIC_FILE,
    attach_critic,
    copy_of_policy,
    critic_aside,
    critic_prefix,
    load_critic,
    make_critic,
    save_critic,
)
from epo_trl.objectives import value_loss
from epo_trl.trainers.critic_values import equal_outcomes, final_states, final_values, value_statistics, whitened
from epo_trl.trainers.epo_trainer import EPOTrainer
from epo_trl.trainers.ppo_config import EPOPPOConfig
from epo_trl.trainers.step import Part, RLStep, ValueTargets, row_ids
from epo_trl.types import Episode

PART, CRITIC = "part", "critic"  # a parameter group of the critic has group["part"] == "critic"


class EPOPPOTrainer(EPOTrainer):
    """Trains a language model on text environments with PPO, a critic and, by default, the terms of EPO.

    Rewards are those of the turns. The critic is a submodule of the policy (`trainer.critic`) but saved separately. The
    arguments are those of `EPOTrainer`, without `reward_funcs`.
    """

    args: EPOPPOConfig
    card_tags = ("trl", "epo_trl", "ppo")
    has_critic = True

    def __init__(self, model: str | PreTrainedModel, suite: TaskSuite, args: EPOPPOConfig | None = None, **kwargs: Any):
        args = args if args is not None else EPOPPOConfig("epo-trl-ppo")
        backbone = copy_of_policy(model, args)

        super().__init__(model, suite, args=args, **kwargs)

        critic = make_critic(
            self.model,
            args,
            backbone=backbone,
            peft_config=kwargs.get("peft_config"),
            token_head=any(method.token_weight for method in self.methods.values()),
        )
        self.critic = critic if self.is_deepspeed_enabled else critic.to(self.accelerator.device)
        attach_critic(self.model, self.critic)
        hide_critic(self)

    # --- Batch -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _method_batch(self, step: RLStep, inputs: dict[str, Any]) -> Batch:
        size, states = self.args.per_device_train_batch_size, self._final_states(step.episodes)
        critic = CriticValues(
            self.scorer.values(self.model, row_ids(inputs), step.layout),
            final_values(self.model, states, size, self.accelerator.device, self.accelerator.autocast),
        )
        return replace(super()._method_batch(step, inputs), critic=critic)

    def _final_states(self, episodes: list[Episode]) -> list[list[int]]:
        """Returns the token ids of the state that each episode was truncated in, `[]` if it is not bootstrapped."""
        if not self.args.bootstrap_truncated:
            return [[] for _ in episodes]
        return final_states(episodes, self.rules.context)

    def _advantages(self, step: RLStep, batch: Batch) -> Tensor:
        """Returns the credit's advantages, whitened if configured, and adds the critic's targets to `step`.

        Advantages are 0 if all outcomes are equal, whitened or not. Whitening would divide the critic's error by its
        own deviation; without whitening, Adam would still amplify a small first gradient. The critic still learns.
        """
        credit = self.methods.credit(batch)
        assert credit.returns is not None and credit.value_mask is not None
        metrics = value_statistics(credit, batch.values, batch.turn_ids, self.args.max_turns, self.ranks.sum)
        count = self.ranks.sum(credit.value_mask.sum().double())
        step.targets = ValueTargets(batch.values, credit.returns, credit.value_mask, count, credit.value_weights)
        step.value_sums = torch.zeros(3, dtype=torch.float64, device=batch.values.device)
        if credit.outcomes is not None:
            metrics["gae/equal_outcomes"] = float(equal_outcomes(credit.outcomes, self.ranks))
        self._keep_metrics(metrics)
        if metrics.get("gae/equal_outcomes"):
            return torch.zeros_like(credit.advantages)
        if not self.args.normalize_advantages:
            return credit.advantages
        return whitened(credit.advantages, batch.mask, self.ranks.sum)

    # --- Loss --------------------------------------------------------------------------------------------------

    def _terms(self, part: Part, micro: MicroBatch, scores: TokenScores) -> Iterator[Tensor]:
        """Yields the methods' terms, then `value_coef` times the mean value loss over the decision points.

        The loss is scaled like the other terms, so it does not depend on how a batch is split.
        """
        yield from super()._terms(part, micro, scores)
        targets, values, sums = part.targets, scores.values, self.step.value_sums
        assert targets is not None and values is not None and sums is not None
        losses, clipped = value_loss(values, targets.values, targets.returns, clip=self.args.value_clip)
        losses = torch.where(targets.points, losses * (1.0 if targets.weights is None else targets.weights), 0.0)
        counts = [losses.detach().sum(), (clipped & targets.points).sum(), targets.points.sum()]
        sums += torch.stack([count.double() for count in counts])
        mean = part.update_factor * losses.sum() / targets.count.clamp(min=1)
        # Values outside the points take part with weight 0, so that every rank uses every parameter of the critic.
        yield self.args.value_coef * (mean + 0.0 * values.sum())

    def _close_rl_step(self) -> None:
        assert self.step.value_sums is not None and self.optimizer is not None
        groups = self.optimizer.param_groups
        total, clipped, count = self.ranks.sum(self.step.value_sums).tolist()
        self._keep_metrics(
            {
                "critic/value_loss": total / max(count, 1),
                "critic/value_clip_share": clipped / max(count, 1),
                "critic/learning_rate": next(group["lr"] for group in groups if group.get(PART) == CRITIC),
            }
        )
        super()._close_rl_step()

    # --- Optimizer ---------------------------------------------------------------------------------------------

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Creates the optimizer with the critic's parameters in separate groups, `group["part"] == "critic"`."""
        optimizer, rate = super().create_optimizer(model), self.args.critic_learning_rate
        if type(optimizer).__name__ == "DummyOptim":  # Accelerate's class, which is only defined with DeepSpeed
            raise InputError(
                "deepspeed: expected a configuration without an optimizer, which would give policy and critic the same "
                "learning rate. Remove the `optimizer` and `scheduler` blocks; the trainer creates both."
            )
        if any(group.get(PART) == CRITIC for group in optimizer.param_groups):
            return optimizer
        own = {id(p) for p in self.critic.parameters() if p.requires_grad}
        if not own <= {id(p) for group in optimizer.param_groups for p in group["params"]}:
            raise InputError(
                "optimizers: expected none, got an optimizer created before the trainer added the critic. Set optim "
                "and learning_rate instead."
            )
        for group in list(optimizer.param_groups):
            params = [p for p in group["params"] if id(p) in own]
            if params:
                group["params"] = [p for p in group["params"] if id(p) not in own]
                changes = {"params": params, PART: CRITIC, **({"lr": rate} if rate is not None else {})}
                optimizer.add_param_group({**group, **changes})
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Creates the scheduler. The policy's learning rate is 0 during the first `critic_warmup_steps`."""
        scheduler, start = super().create_scheduler(num_training_steps, optimizer), self.args.critic_warmup_steps
        for i, group in enumerate(scheduler.optimizer.param_groups if start else ()):
            if group.get(PART) != CRITIC:
                scheduler.lr_lambdas[i] = lambda step, own=scheduler.lr_lambdas[i]: 0.0 if step < start else own(step)
                group["lr"] = scheduler.base_lrs[i] * scheduler.lr_lambdas[i](scheduler.last_epoch)
                scheduler.get_last_lr()[i] = group["lr"]  # the list itself: logs read it
        return scheduler

    def _clip_grad_norm(self, model: Any) -> Any:
        """Clips policy and critic separately, so that a large error of the critic does not shrink the policy's step.

        Returns the policy's norm before clipping, or the critic's if that is not finite. DeepSpeed and FSDP clip both
        together.
        """
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            return super()._clip_grad_norm(model)
        own, limit = {id(p) for p in self.critic.parameters()}, self.args.max_grad_norm
        policy = [p for p in model.parameters() if id(p) not in own]
        norm = self.accelerator.clip_grad_norm_(policy, limit)  # unscales all gradients, only once
        critic_norm = torch.nn.utils.clip_grad_norm_(self.critic.parameters(), limit)
        return norm if critic_norm.isfinite() else critic_norm

    # --- Checkpoints -------------------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """Saves the policy without the critic, and the critic's trained parameters in a separate file."""
        if not self.args.should_save:
            return
        state_dict = self.model.state_dict() if state_dict is None else state_dict
        prefix = critic_prefix(self.model, self.critic)
        policy = {name: value for name, value in state_dict.items() if not name.startswith(prefix)}
        with critic_aside(self.model):
            super()._save(output_dir, policy)
        folder = output_dir if output_dir is not None else self.args.output_dir
        save_critic(folder, self.critic, state_dict, prefix)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self.is_fsdp_enabled:  # FSDP's checkpoint holds policy and critic
            return super()._load_from_checkpoint(resume_from_checkpoint, model)
        with self._loading_critic(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        best = str(self.state.best_model_checkpoint)
        holds_both = self.is_fsdp_enabled or self.is_deepspeed_enabled
        if holds_both or not os.path.isdir(best):  # without it, the last weights stay
            return super()._load_best_model()
        with self._loading_critic(best):
            super()._load_best_model()

    @contextmanager
    def _loading_critic(self, checkpoint: str) -> Iterator[None]:
        """Loads the critic from its own file after the block, which loads the policy alone."""
        with critic_aside(self.model):
            yield
        load_critic(os.path.join(checkpoint, CRITIC_FILE), self.critic)


def hide_critic(trainer: GRPOTrainer) -> None:
    """Hides the critic from TRL's reference model and its generation.

    The reference model has no critic, and `sync_ref_model` pairs all parameters of both models. vLLM has no critic, and
    TRL sends it all parameters.
    """
    aside = critic_aside(trainer.model)  # as a decorator, which enters it for each call
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, SyncRefModelCallback):
            callback.sync_target_model = aside(callback.sync_target_model)
    if trainer.use_vllm:
        trainer.vllm_generation.sync_weights = aside(trainer.vllm_generation.sync_weights)
