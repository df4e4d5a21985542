"""PPO with a critic over many turns (arXiv 1707.06347), on top of EPOTrainer.

What it adds to its parent, at these seams and always around `super()`:

- `_rollout`: the states after the last turn of episodes that were cut off;
- `_generate_and_score_completions`: values of the batch as it was collected, GAE, normalised advantages;
- `_score_turns` and `compute_loss`: values from the same forward pass, the value loss;
- `create_optimizer`, `create_scheduler`, `_clip_grad_norm`: the critic's own rate, warm-up and clipping;
- `_save`, `_load_from_checkpoint`: the critic's own file.
"""

from __future__ import annotations

import os
from typing import Any

import safetensors.torch
import torch
from accelerate.utils import is_peft_model
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel
from trl import GRPOTrainer
from trl.trainer.callbacks import SyncRefModelCallback
from trl.trainer.utils import disable_dropout_in_model

from epo_trl.advantages import CREDITS, ValueBatch
from epo_trl.envs.base import TaskSuite
from epo_trl.long_runs.update_guard import spread_nonfinite
from epo_trl.models.critic import (
    Critic,
    attach_critic,
    causal_lm,
    copied_trunk,
    critic_aside,
    loaded_trunk,
    with_adapter,
)
from epo_trl.objectives import value_loss
from epo_trl.trainers.checks import check_critic_vocabulary, check_trunk
from epo_trl.trainers.epo_trainer import EPOTrainer
from epo_trl.trainers.final_states import final_states
from epo_trl.trainers.model_card import PPO
from epo_trl.trainers.ppo_config import EPOPPOConfig
from epo_trl.trainers.turn_forward import TurnBatch, TurnScores, cut_turns, score_turns, value_turns
from epo_trl.trainers.value_statistics import normalized, value_statistics
from epo_trl.types import Episode

CRITIC_FILE = "critic.safetensors"


class EPOPPOTrainer(EPOTrainer):
    """Trains a language model on text environments with PPO, a critic and the entropy terms of EPO.

    Rewards are those of the turns. The critic is a submodule of the policy (`trainer.critic`) but saved apart from it.

    Args:
        model: A model, a Hub id or a local path.
        suite: The tasks and their environments.
        args: The configuration.
        train_dataset: Rows with a `prompt` column that holds task ids; by default the suite's `train` list.
        processing_class: The tokenizer; by default the model's.
        **kwargs: Passed to `EPOTrainer` (`peft_config`, `callbacks`, ...).
    """

    args: EPOPPOConfig
    _tag_names = ["trl", "epo_trl", "ppo"]
    _name = "PPO with EPO"
    _method = f"{PPO} with a critic"

    def __init__(self, model: str | PreTrainedModel, suite: TaskSuite, args: EPOPPOConfig | None = None, **kwargs: Any):
        args = args if args is not None else EPOPPOConfig("epo-trl-ppo")
        if kwargs.get("reward_funcs") is not None:
            raise ValueError(
                "reward_funcs: got reward functions, takes none: the critic learns the rewards of the turns; change "
                "those with success_reward, env_reward_weight and invalid_action_penalty"
            )
        # An object in memory may differ from the files it came from, so it is copied, before PEFT and TRL change it.
        trunk = copied_trunk(model) if args.critic == "separate" and _can_be_copied(model, args) else None
        super().__init__(model, suite, args=args, **kwargs)
        self.critic = self._make_critic(trunk, kwargs.get("peft_config"))
        attach_critic(self.model, self.critic)
        self._hide_critic_from_reference()
        self._values: list[Tensor] | None = None
        self._final_states: list[list[int]] = []
        self._value_sums = torch.zeros(3, dtype=torch.float64, device=self.accelerator.device)
        if self.use_vllm:
            self._hide_critic_from_vllm()

    # --- The critic --------------------------------------------------------------------------------------------

    def _make_critic(self, trunk: Any, peft_config: Any) -> Critic:
        args, base = self.args, causal_lm(self.model)
        if peft_config is None and is_peft_model(self.model):
            peft_config = self.model.active_peft_config
        check_trunk(args.critic, base, peft_config)
        if args.critic == "separate" and trunk is None:
            trunk = self._load_trunk(base)
        if args.critic_use_peft:
            if peft_config is None:
                raise ValueError("critic_use_peft: got True for a policy without adapter, takes False then")
            trunk = with_adapter(trunk, peft_config)
        config = (trunk if trunk is not None else base).config.get_text_config()
        critic = Critic(config.hidden_size, trunk)
        if args.disable_dropout:
            disable_dropout_in_model(critic)
        return critic if self.is_deepspeed_enabled else critic.to(self.accelerator.device)

    def _load_trunk(self, policy: Any) -> Any:
        other = self.args.critic_model_name_or_path
        path = other or policy.config._name_or_path
        if not path:
            raise ValueError(
                "critic: got 'separate' for a policy that was made in memory and is wrapped already; takes the plain "
                "model with peft_config, or a critic_model_name_or_path"
            )
        trust = {"trust_remote_code": self.args.trust_remote_code}
        revision = None if other else (self.args.model_init_kwargs or {}).get("revision")
        trunk = loaded_trunk(path, policy, revision=revision or "main", **trust)
        if other:
            check_critic_vocabulary(path, trunk.config.get_text_config().vocab_size, self._tokenizer, **trust)
        return trunk

    def _hide_critic_from_reference(self) -> None:
        """The reference model has no critic, and `sync_ref_model` pairs every parameter with one of its own."""
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, SyncRefModelCallback):
                sync = callback.sync_target_model

                def sync_policy(model: Any, *args: Any, sync: Any = sync) -> None:
                    with critic_aside(model):
                        sync(model, *args)

                callback.sync_target_model = sync_policy

    def _hide_critic_from_vllm(self) -> None:
        """The engine has no critic, and TRL sends it every parameter of the model."""
        sync = self.vllm_generation.sync_weights

        def sync_policy() -> None:
            with critic_aside(self.model):
                sync()

        self.vllm_generation.sync_weights = sync_policy

    # --- Rollout -----------------------------------------------------------------------------------------------

    def _rollout(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        output = super()._rollout(prompts, trainer)
        self._final_states = self._states_after(self._episodes)
        return output

    def _states_after(self, episodes: list[Episode]) -> list[list[int]]:
        """Returns the token ids of the state that each episode was cut off in, `[]` where nothing is bootstrapped."""
        if not self.args.bootstrap_truncated:
            return [[] for _ in episodes]
        return final_states(episodes, self.context)

    # --- Batch -------------------------------------------------------------------------------------------------

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        turn_ids, mask = output["turn_ids"], output["completion_mask"] * output["tool_mask"]
        with torch.no_grad():
            values = self._old_values(output)
            final_values = self._final_values()
        estimate = CREDITS[self.args.credit](
            ValueBatch(values, self._turn_rewards(), final_values, turn_ids, mask),
            self.args.gamma,
            self.args.gae_lambda,
        )
        metrics = value_statistics(estimate, values, turn_ids, self.args.max_turns, self._sum_over_ranks)
        for name, value in metrics.items():
            self._metrics["train" if self.model.training else "eval"][name].append(value)
        advantages = estimate.advantages
        if self.args.normalize_advantages:
            advantages = normalized(advantages, mask, self._sum_over_ranks)
        output["advantages"] = advantages
        output["old_values"], output["returns"], output["value_points"] = values, estimate.returns, estimate.points
        output["num_values"] = self._sum_over_ranks(estimate.points.sum().double())
        return output

    @property
    def _compared(self) -> tuple[int, str]:
        return self.args.generation_batch_size, "the whole batch"

    def _sum_over_ranks(self, sums: Tensor) -> Tensor:
        return self.accelerator.reduce(sums, reduction="sum")

    def _turn_rewards(self) -> Tensor:
        """Returns (B, K) rewards of the turns, 0 beyond an episode's last and for aborted ones."""
        rewards = [[turn.reward for turn in episode.turns] * episode.is_usable for episode in self._episodes]
        width = max(1, *map(len, rewards))
        return torch.tensor([row + [0.0] * (width - len(row)) for row in rewards], device=self.accelerator.device)

    def _old_values(self, output: dict[str, Any]) -> Tensor:
        """Returns (B, T) values by the critic as it is now, in chunks of a micro-batch. Collective under ZeRO-3."""
        assert self._layout is not None
        input_ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
        attention_mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
        rows, size = [], self.args.per_device_train_batch_size
        for start in range(0, len(input_ids), size):
            end = start + size
            turns = cut_turns(input_ids[start:end], attention_mask[start:end], self._layout.rows(start, end))
            with self.accelerator.autocast():
                rows.append(turns.to_rows(value_turns(self.model, turns, **self._turn_passes)))
        return torch.cat(rows)

    def _final_values(self) -> Tensor:
        """Returns (B,) values of the final states, 0 where there is none. Collective under ZeRO-3.

        Every rank makes as many passes as it has micro-batches of episodes, whether or not one was cut off.
        """
        device, size = self.accelerator.device, self.args.per_device_train_batch_size
        values = []
        for start in range(0, len(self._final_states), size):
            states = self._final_states[start : start + size]
            lengths = torch.tensor([max(len(state), 1) for state in states], device=device)
            ids = torch.zeros(len(states), int(lengths.max()), dtype=torch.long)
            for row, state in zip(ids, states, strict=True):
                row[: len(state)] = torch.tensor(state, dtype=torch.long)
            with self.accelerator.autocast():
                found = self.model(input_ids=ids.to(device), values_only=True).state_values
            cut_off = torch.tensor([bool(state) for state in states], device=device)
            values.append(found.gather(1, lengths.unsqueeze(1) - 1).squeeze(1) * cut_off)
        return torch.cat(values)

    # --- Loss --------------------------------------------------------------------------------------------------

    def _score_turns(self, model: Any, turns: TurnBatch, **model_inputs: Any) -> TurnScores:
        if self._values is None:
            return super()._score_turns(model, turns, **model_inputs)
        scores = score_turns(model, turns, **self._turn_passes, with_values=True, **model_inputs)
        assert scores.values is not None
        self._values.append(turns.to_rows(scores.values))
        return scores

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """Returns the loss of EPOTrainer plus `value_coef` times the mean value loss over the decision points.

        Scaled like the other terms, so that it does not depend on how a batch is cut.
        """
        self._values = []
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        (values,), self._values = self._values, None
        points = inputs["value_points"]
        losses, clipped = value_loss(
            values[points], inputs["old_values"][points], inputs["returns"][points], clip=self.args.value_clip
        )
        counts = [losses.detach().sum(), clipped.sum(), points.sum()]
        self._value_sums += torch.stack([count.double() for count in counts])
        steps = self.current_gradient_accumulation_steps / self.args.steps_per_generation
        per_update = inputs["num_values"].clamp(min=1) / self.accelerator.num_processes * steps
        # Values outside of the points take part with weight 0: every rank uses every parameter of the critic.
        return spread_nonfinite(
            loss + self.args.value_coef * (losses.sum() / per_update + 0.0 * values.sum()).to(loss.dtype)
        )

    def _close_rl_step(self) -> None:
        total, clipped, count = self._sum_over_ranks(self._value_sums).tolist()
        self._value_sums.zero_()
        metrics = self._metrics["train"]
        metrics["critic/value_loss"].append(total / max(count, 1))
        metrics["critic/value_clip_share"].append(clipped / max(count, 1))
        rates = [group["lr"] for group in self.optimizer.param_groups if group.get("part") == "critic"]
        metrics["critic/learning_rate"].append(float(rates[0]))
        super()._close_rl_step()

    # --- Optimizer ---------------------------------------------------------------------------------------------

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Returns the optimizer with the critic's parameters in groups of their own, `group["part"] == "critic"`."""
        optimizer = super().create_optimizer(model)
        if self.is_deepspeed_enabled:
            from accelerate.utils import DummyOptim  # only there with DeepSpeed

            if isinstance(optimizer, DummyOptim):
                raise ValueError(
                    "deepspeed: got a configuration with an optimizer of its own, which gives policy and critic one "
                    "learning rate; take the `optimizer` and `scheduler` blocks out, the trainer makes both"
                )
        if any(group.get("part") == "critic" for group in optimizer.param_groups):
            return optimizer
        own = {id(p) for p in self.critic.parameters() if p.requires_grad}
        if not own <= {id(p) for group in optimizer.param_groups for p in group["params"]}:
            raise ValueError(
                "optimizers: got an optimizer that was made before the trainer added the critic; set optim and "
                "learning_rate instead"
            )
        rate = self.args.critic_learning_rate
        for group in list(optimizer.param_groups):
            critic = [p for p in group["params"] if id(p) in own]
            if critic:
                group["params"] = [p for p in group["params"] if id(p) not in own]
                changes = {"params": critic, "part": "critic", **({"lr": rate} if rate is not None else {})}
                optimizer.add_param_group({**group, **changes})
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Returns the scheduler; the policy's rate is 0 for the first `critic_warmup_steps`, then what it would be."""
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        warmup = self.args.critic_warmup_steps
        if not warmup:
            return scheduler
        if not isinstance(scheduler, LambdaLR):
            raise ValueError(
                f"critic_warmup_steps: got {warmup} with lr_scheduler_type={self.args.lr_scheduler_type!r}, takes a "
                "schedule that is a function of the step, such as 'cosine' or 'constant', or 0"
            )
        for i, group in enumerate(scheduler.optimizer.param_groups):
            if group.get("part") != "critic":
                scheduler.lr_lambdas[i] = _zero_before(warmup, scheduler.lr_lambdas[i])
                group["lr"] = scheduler.base_lrs[i] * scheduler.lr_lambdas[i](scheduler.last_epoch)
                scheduler._last_lr[i] = group["lr"]
        return scheduler

    def _clip_grad_norm(self, model: Any) -> Any:
        """Clips policy and critic apart, so that a large error of the critic does not shrink the policy's step.

        DeepSpeed and FSDP clip both together. Returns the policy's norm before clipping, or the critic's if that is not
        finite.
        """
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            return super()._clip_grad_norm(model)
        own = {id(p) for p in self.critic.parameters()}
        policy = [p for p in model.parameters() if id(p) not in own]
        norm = self.accelerator.clip_grad_norm_(policy, self.args.max_grad_norm)  # unscales all gradients, only once
        critic_norm = torch.nn.utils.clip_grad_norm_(self.critic.parameters(), self.args.max_grad_norm)
        return norm if critic_norm.isfinite() else critic_norm

    # --- Checkpoints -------------------------------------------------------------------------------------------

    def _batch_state(self) -> dict[str, Any]:
        return {**super()._batch_state(), "value_sums": self._value_sums}

    def _load_batch_state(self, state: dict[str, Any]) -> None:
        super()._load_batch_state(state)
        self._value_sums = state["value_sums"]

    @property
    def _critic_prefix(self) -> str:
        return next(name for name, module in self.model.named_modules() if module is self.critic) + "."

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """Saves the policy as if there were no critic, and what is trained of the critic in a file of its own."""
        if not self.args.should_save:
            return
        state_dict = self.model.state_dict() if state_dict is None else state_dict
        prefix = self._critic_prefix
        policy = {name: value for name, value in state_dict.items() if not name.startswith(prefix)}
        names = [name for name in self.critic.trained_names() if prefix + name in state_dict]
        with critic_aside(self.model):
            super()._save(output_dir, policy)
        if names:  # none if ZeRO-3 was told not to gather the weights
            critic = {name: state_dict[prefix + name].detach().cpu().contiguous() for name in names}
            folder = output_dir if output_dir is not None else self.args.output_dir
            safetensors.torch.save_file(critic, os.path.join(folder, CRITIC_FILE), metadata={"format": "pt"})

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        path = os.path.join(resume_from_checkpoint, CRITIC_FILE)
        if not os.path.isfile(path):
            raise ValueError(
                f"resume_from_checkpoint: {path} is missing; the checkpoint was not written by EPOPPOTrainer"
            )
        with critic_aside(self.model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        saved, expected = safetensors.torch.load_file(path), set(self.critic.trained_names())
        if saved.keys() != expected:
            raise ValueError(
                f"resume_from_checkpoint: {path} holds another kind of critic: {len(saved.keys() - expected)} "
                f"parameters that this one does not train, {len(expected - saved.keys())} missing; set critic, "
                "critic_use_peft and the models as they were"
            )
        self.critic.load_state_dict(saved, strict=False)


def _can_be_copied(model: Any, args: EPOPPOConfig) -> bool:
    """Whether the weights are here, whole and plain: not a name, not wrapped by PEFT, not split by ZeRO-3."""
    if isinstance(model, str) or args.critic_model_name_or_path is not None or is_peft_model(model):
        return False
    if getattr(model, "hf_quantizer", None) is not None:
        return False
    return not any("ds_id" in vars(parameter) for parameter in model.parameters())


def _zero_before(start: int, schedule: Any) -> Any:
    return lambda step: 0.0 if step < start else schedule(step)
