"""What we rely on in TRL 1.16, checked one by one: when TRL moves, this file says where and what to do.

The first part compares names and signatures, the second runs the seams on a tiny model.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from foreign_names import TABLE, advice
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import utils as trl_utils
from trl.trainer.callbacks import SyncRefModelCallback

from epo_trl.models import build_model, build_tokenizer
from epo_trl.trainers.config import LOSSES


@dataclass(frozen=True)
class Seam:
    name: str
    parameters: str  # as in the signature, without annotations
    used: str = ""  # for public ones; CONTRIBUTING.md says it of the others


_MULTIMODAL = (
    "pixel_values=None, image_grid_thw=None, num_images=None, pixel_attention_mask=None, spatial_shapes=None, "
    "num_tiles=None, image_sizes=None, token_type_ids=None, mm_token_type_ids=None, image_position_ids=None"
)
SEAMS = [
    Seam(
        "_get_per_token_logps_and_entropies",
        "self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, compute_entropy=False, "
        f"compute_aux_loss=False, {_MULTIMODAL}",
    ),
    Seam(
        "_generate_single_turn", "self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False"
    ),
    Seam("_generate_and_score_completions", "self, inputs"),
    Seam("_prepare_inputs", "self, generation_batch", "its buffer decides which micro-batches belong to an RL step"),
    Seam(
        "training_step",
        "self, model, inputs, num_items_in_batch",
        "overridden: closes the RL step after its last micro-batch",
    ),
    Seam(
        "compute_loss",
        "self, model, inputs, return_outputs=False, num_items_in_batch=None",
        "overridden: adds the terms of the methods to TRL's policy loss",
    ),
    Seam("_compute_loss", "self, model, inputs", "must ask for log-probs once, with compute_entropy=True"),
    Seam("_calculate_rewards", "self, inputs, prompts, completions, completion_ids_list"),
    Seam(
        "train",
        "self, resume_from_checkpoint=None, trial=None, ignore_keys_for_eval=None",
        "overridden: SIGTERM is taken over while it runs, and a checkpoint is checked before",
    ),
    Seam("_get_grad_norm", "self, model, grad_norm=None"),
    Seam("_save_checkpoint", "self, model, trial"),
    Seam("_load_optimizer_and_scheduler", "self, checkpoint"),
    Seam("_push_from_checkpoint", "self, checkpoint_folder"),
    Seam("_load_rng_state", "self, checkpoint"),
    Seam("_get_train_sampler", "self, dataset=None"),
    Seam(
        "_init_training_state",
        "self, max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial",
    ),
    Seam("_finalize_training", "self, trial, num_train_samples, start_time"),
    Seam(
        "evaluate",
        "self, eval_dataset=None, ignore_keys=None, metric_key_prefix='eval'",
        "overridden: plays the fixed test lists",
    ),
    Seam("log", "self, logs, start_time=None", "overridden: adds metrics and shows sample episodes"),
    Seam("_get_output_dir", "self, trial"),
    Seam("save_model", "self, output_dir=None, _internal_call=False", "overridden: the final model appears at once"),
    Seam("create_optimizer", "self, model=None", "overridden: groups of its own for the critic"),
    Seam("create_scheduler", "self, num_training_steps, optimizer=None", "overridden: holds the policy in the warm-up"),
    Seam("_clip_grad_norm", "self, model"),
    Seam("_save", "self, output_dir=None, state_dict=None"),
    Seam(
        "create_model_card",
        "self, model_name=None, dataset_name=None, tags=None",
        "overridden: a card of ours takes the place of TRL's (model_card.py)",
    ),
    Seam("_load_best_model", "self"),
    Seam("_send_telemetry", "self", "overridden: a run whose model is not of the Hub is not reported"),
    Seam("_load_from_checkpoint", "self, resume_from_checkpoint, model=None"),
]


def signature_of(function: Callable[..., Any]) -> str:
    parameters = inspect.signature(function).parameters.values()
    return ", ".join(str(p.replace(annotation=inspect.Parameter.empty)) for p in parameters)


def test_trl_is_the_version_that_setup_cfg_pins():
    pin = re.search(r"trl>=(\d+)\.(\d+)", (Path(__file__).parents[1] / "setup.cfg").read_text())
    assert pin is not None, "setup.cfg no longer pins trl; the seams below are not TRL's public interface: pin it"
    wanted, got = (int(pin[1]), int(pin[2])), tuple(int(x) for x in trl.__version__.split(".")[:2])
    assert got == wanted, advice("its version", wanted, got, "everything")


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.name)
def test_seam_has_the_expected_signature(seam):
    function = getattr(GRPOTrainer, seam.name, None)
    assert function is not None, advice(seam.name, seam.parameters, "no such method", seam.used)
    got = signature_of(function)
    assert got == seam.parameters, advice(seam.name, seam.parameters, got, seam.used)


@pytest.mark.parametrize(
    ("where", "pattern", "used"),
    [
        (
            "_compute_loss",
            r"if advantages\.dim\(\) == 1:\s+advantages = advantages\.unsqueeze\(1\)",
            "advantages of shape (B, T) pass through, so credit can differ from turn to turn",
        ),
        ("_compute_loss", r'completion_mask \* inputs\["tool_mask"\]', "environment tokens are left out of the loss"),
        ("_generate", r'tool_mask = extra_fields\.pop\("env_mask", None\)', "env_mask of the rollout is the tool mask"),
        ("_generate", r"self\.rollout_func\(prompts, self\)", "the rollout gets the prompts and the trainer"),
        ("_generate_and_score_completions", r'output\["tool_mask"\] = tool_mask', "the tool mask is in the batch"),
        (
            "_run_epoch",
            r"self\._get_grad_norm\(model, grad_norm=grad_norm\)[\s\S]*self\.optimizer\.step\(\)",
            "gradients that are dropped there are not used by the optimizer",
        ),
        (
            "_calculate_rewards",
            r"rewards_per_func = gather\(rewards_per_func\)\s+return rewards_per_func",
            "the rewards of all ranks come back, so that those of aborted episodes can be taken out",
        ),
        (
            "_generate_and_score_completions",
            r"unscorable_mask = torch\.isnan\(rewards_per_func\)\.all\(dim=1\)",
            "episodes without a reward are left out of the baseline",
        ),
        (
            "_generate_and_score_completions",
            r"gradient_accumulation_steps % generate_every != 0[\s\S]*"
            r'output\["old_per_token_logps"\] = old_per_token_logps',
            "a batch that serves several updates is scored before the first, as it is: what the methods measure",
        ),
        (
            "__init__",
            r'self\.entropy_coef = args\.entropy_coef\n[\s\S]*self\._last_world_entropy = float\("inf"\)[\s\S]*'
            r"self\._entropy_window_stats = None[\s\S]*self\._current_train_step_time = 0\.0",
            "a second run of a trainer begins with these values",
        ),
        ("training_step", r"self\._step \+= 1", "_step counts micro-batches and tells where an RL step ends"),
        (
            "_prepare_inputs",
            r"or self\._buffered_inputs is None:[\s\S]*self\._buffered_inputs = \[[\s\S]*"
            r"inputs = self\._buffered_inputs\[self\._step % self\.args\.steps_per_generation\]",
            "a resumed run goes on with the batch in use; None makes TRL collect another",
        ),
        (
            "save_model",
            r"if self\.args\.push_to_hub and not _internal_call:",
            "the final model is not pushed to the Hub before it is whole",
        ),
        (
            "_prepare_inputs",
            r"generate_every = self\.args\.steps_per_generation \* self\.num_iterations\s+"
            r"if self\._step % generate_every == 0",
            "one rollout lasts steps_per_generation * num_iterations micro-batches",
        ),
        (
            "_generate_single_turn",
            r"generation_config=self\.generation_config[\s\S]*generation_kwargs=self\.generation_kwargs",
            "evaluation sets another temperature in generation_config and generation_kwargs",
        ),
    ],
)
def test_source_says_what_we_rely_on(where, pattern, used):
    source = inspect.getsource(inspect.unwrap(getattr(GRPOTrainer, where)))
    assert re.search(pattern, source), advice(where, pattern, "no such line", used)


def test_the_loss_hands_its_model_to_what_scores_it_and_to_nothing_else():
    """`compute_loss` passes scores in the model's place."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(GRPOTrainer._compute_loss))))
    readers = [
        ast.unparse(call.func)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and any(isinstance(x, ast.Name) and x.id == "model" for x in call.args)
    ]
    count = sum(isinstance(node, ast.Name) and node.id == "model" for node in ast.walk(tree))
    wanted = (["self._get_per_token_logps_and_entropies"], 1)
    assert (readers, count) == wanted, advice("_compute_loss", wanted, (readers, count), "scores in the model's place")


def test_the_losses_that_we_take_are_those_of_trl():
    source = inspect.getsource(inspect.unwrap(GRPOTrainer._compute_loss))
    compared = re.findall(r"self\.loss_type (?:==|in) (\[[^]]*\]|\"\w+\")", source)
    known = {name for text in compared for name in re.findall(r'"(\w+)"', text)}
    assert known == set(LOSSES), advice("_compute_loss", sorted(LOSSES), sorted(known), "LOSSES (trainers/config.py)")


def test_the_reference_model_is_synchronised_through_one_function():
    source, line = inspect.getsource(SyncRefModelCallback.on_step_end), "self.sync_target_model(model, self.ref_model,"
    assert line in source, advice("sync_target_model", line, "no such line")


def test_only_the_configuration_refuses_groups_of_one():
    """EPOPPOConfig shows GRPOConfig another number while it is checked; the trainer has a case for one."""
    used = "PPO plays each task once (trainers/ppo_config.py)"
    with pytest.raises(ValueError, match="GRPO requires at least 2 generations"):
        GRPOConfig("x", num_generations=1, use_cpu=True, bf16=False)
    source = inspect.getsource(GRPOTrainer)
    for line in ("self.num_generations = args.num_generations", "if num_generations > 1:"):
        assert line in source, advice("groups of one", line, "no such line", used)


# ------------------------------------------------------------------------------------------ the seams on a tiny model


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(["go to drawer 3 and look", "<think> </think> <action> </action>"])


ROWS = 4
RESPONSE_MASK = [[1, 1, 0, 0, 1, 1], [1, 0, 0, 1, 1], [1, 1, 1], [1, 0, 1, 1]]


@pytest.fixture(scope="module")
def rollout(tokenizer, tmp_path_factory):
    """Returns a trainer, what the reward function was given, and the batch that one fixed rollout became."""
    seen: dict[str, Any] = {}
    completions = [[5 + i for i in range(len(mask))] for mask in RESPONSE_MASK]

    def play(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        seen["prompts"] = list(prompts)
        return {
            "prompt_ids": [[10], [10, 11, 12], [10, 11], [10]],
            "completion_ids": completions,
            "env_mask": RESPONSE_MASK,
            "logprobs": None,
            "episode_return": [1.0, 0.0, None, 1.0],
        }

    def reward(completions: list[Any], episode_return: list[float | None], **_: Any) -> list[float | None]:
        seen["episode_return"] = episode_return
        return episode_return

    args = GRPOConfig(
        str(tmp_path_factory.mktemp("contract")),
        per_device_train_batch_size=ROWS,
        num_generations=ROWS,
        max_completion_length=8,
        loss_type="grpo",
        use_cpu=True,
        bf16=False,
        report_to=[],
    )
    trainer = GRPOTrainer(
        build_model(tokenizer, hidden_size=32, heads=2),
        reward,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["train/0"] * ROWS}),
        processing_class=tokenizer,
        rollout_func=play,
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    # one dict per row, as from a dataset: TRL writes the extra fields into them
    batch = trainer._generate_and_score_completions([{"prompt": "train/0"} for _ in range(ROWS)])
    return trainer, seen, batch


def test_env_mask_of_a_rollout_becomes_the_tool_mask(rollout):
    _, seen, batch = rollout
    assert seen["prompts"] == ["train/0"] * ROWS
    used = "turns are told from environment tokens by it"
    got = [row[: len(want)] for row, want in zip(batch["tool_mask"].tolist(), RESPONSE_MASK, strict=True)]
    assert got == RESPONSE_MASK, advice("env_mask -> tool_mask", RESPONSE_MASK, got, used)
    lengths = batch["completion_mask"].sum(1).tolist()
    assert lengths == [6, 5, 3, 4], advice("completion_mask", [6, 5, 3, 4], lengths, "completions are not truncated")
    assert batch["completion_ids"].shape == batch["tool_mask"].shape == (ROWS, 6)


def test_extra_fields_reach_the_reward_functions_and_none_leaves_the_baseline(rollout):
    _, seen, batch = rollout
    assert seen["episode_return"] == [1.0, 0.0, None, 1.0]
    advantages = batch["advantages"]
    # mean of 1, 0, 1 is 2/3; the row without a reward gets no learning signal
    assert advantages[2] == 0 and advantages[1] < 0 < advantages[0] == advantages[3], advice(
        "advantages", "[+, -, 0, +]", advantages.tolist(), "an aborted episode must not move the group's baseline"
    )
    assert float(-advantages[1] / advantages[0]) == pytest.approx(2.0, rel=1e-4)


def test_loss_takes_one_advantage_per_token_and_asks_for_entropy_once(rollout, monkeypatch):
    trainer, _, batch = rollout
    calls: list[Any] = []
    original = trainer._get_per_token_logps_and_entropies
    monkeypatch.setattr(
        trainer,
        "_get_per_token_logps_and_entropies",
        lambda *args, **kwargs: calls.append(kwargs) or original(*args, **kwargs),
    )
    advantages = torch.arange(24.0).view(ROWS, 6)
    loss = trainer._compute_loss(trainer.model, {**batch, "advantages": advantages, "old_per_token_logps": None})
    mask = (batch["completion_mask"] * batch["tool_mask"]).float()
    # the ratio is 1, so each row's loss is minus the mean advantage of its response tokens
    expected = -((advantages * mask).sum(1) / mask.sum(1)).mean()
    assert float(loss.detach()) == pytest.approx(float(expected), rel=1e-5), advice(
        "_compute_loss with advantages of shape (B, T)", float(expected), float(loss.detach()), "per-turn credit"
    )
    flags = [kwargs.get("compute_entropy") for kwargs in calls]
    assert flags == [True], advice("_compute_loss", "one call with compute_entropy=True", flags, "entropy of EPO")


def test_entropy_carries_gradient_and_is_of_the_tempered_distribution(rollout):
    trainer, _, batch = rollout
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    _, entropy, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 6, compute_entropy=True)
    logp = (trainer.model(ids, attention_mask=mask).logits[:, -7:-1] / trainer.temperature).log_softmax(-1)
    real = batch["completion_mask"].bool()
    torch.testing.assert_close(entropy[real], -(logp.exp() * logp).sum(-1)[real], rtol=1e-4, atol=1e-5)
    assert entropy.requires_grad and not entropy[~real].any(), advice(
        "_get_per_token_logps_and_entropies", "entropy with gradient, 0 on padding", entropy, "the entropy bonus"
    )


def test_one_turn_is_generated_from_token_ids(rollout):
    trainer, _, _ = rollout
    prompts = [[10, 11], [12], [10, 11, 12]]
    completions, logprobs = trainer._generate_single_turn(prompts, None, {}, 1)
    assert len(completions) == 3 and logprobs is None
    assert all(isinstance(ids, list) and 1 <= len(ids) <= 8 and isinstance(ids[0], int) for ids in completions), advice(
        "_generate_single_turn", "one non-empty list of token ids per prompt", completions, "the rollout"
    )


@pytest.mark.parametrize(
    "name",
    """_metrics _step _buffered_inputs processing_class pad_to_multiple_of eos_token_ids
    generation_config generation_kwargs use_vllm temperature accelerator
    num_generations num_iterations current_gradient_accumulation_steps loss_type max_completion_length reward_weights
    rollout_func callback_handler""".split(),
)
def test_attributes_that_we_read_exist(rollout, name):
    used = "" if name in TABLE else "read or set by the trainers"
    assert name in vars(rollout[0]), advice(name, "an attribute of the trainer", "no such attribute", used)


def test_metrics_are_kept_by_mode_and_name(rollout):
    got = getattr(rollout[0], "_metrics", {})
    assert set(got) == {"train", "eval"} and got["train"]["never logged"] == [], advice(
        "_metrics", "{'train': name -> list, 'eval': name -> list}, a new name begins with []", got
    )


def test_a_sleeping_vllm_is_woken_and_filled_by_what_we_call_and_set():
    """vLLM is not here; `make test-vllm` runs it. TRL's lines that `TurnGenerator` and `hide_critic` stand in for."""
    source = (Path(trl.__file__).with_name("generation") / "vllm_generation.py").read_text()
    used = "vLLM sleeps between rollouts only (trainers/generation.py)"
    for line in ('self.llm.wake_up(tags=["weights"])', 'self.llm.wake_up(tags=["kv_cache"])', "self.llm.sleep(level=2)",
                 "if self.enable_sleep_mode:"):  # fmt: skip
        assert line in source, advice("VLLMGeneration", line, "no such line", used)
    line = "self._llm_weights_sleeping = True"
    assert line in source, advice("_llm_weights_sleeping", line, "no such line")
    line = "def sync_weights(self)"
    assert line in source, advice("sync_weights", line, "no such line")
    generate = inspect.getsource(GRPOTrainer._generate_single_turn)
    line = "self._last_loaded_step = self.state.global_step"
    assert line in generate, advice("_last_loaded_step", line, "no such line")
    line = "self.vllm_generation.sync_weights()"
    assert line in generate, advice("sync_weights", line, "no such line")


def test_generation_keeps_its_temperature_in_two_places(rollout):
    trainer, _, _ = rollout
    got = (trainer.generation_config.temperature, trainer.generation_kwargs["temperature"])
    assert got == (1.0, 1.0), advice("temperature", (1.0, 1.0), got, "evaluation samples at another temperature")


def test_extra_tensors_are_shuffled_and_split_along_and_scalars_are_kept():
    batch = {"ids": torch.arange(6).view(6, 1), "turn_ids": torch.arange(6).view(6, 1), "num": torch.tensor(6.0)}
    chunks = trl_utils.split_tensor_dict(trl_utils.shuffle_sequence_dict(batch), 3)
    assert [len(chunk["ids"]) for chunk in chunks] == [2, 2, 2]
    assert all(torch.equal(chunk["ids"], chunk["turn_ids"]) and chunk["num"] == 6.0 for chunk in chunks)
    assert sorted(torch.cat([chunk["ids"] for chunk in chunks]).flatten().tolist()) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("family", ["llama", "seed_oss", "gemma2"])
@pytest.mark.parametrize("shifted", [True, False], ids=["shift_labels", "labels"])
@pytest.mark.parametrize("compact", [True, False])
def test_fused_head_scores_only_labelled_positions(tokenizer, monkeypatch, family, shifted, compact):
    """`labels` are shifted by the head, `shift_labels` are not; both give log-prob and entropy, 0 where -100."""
    used = "scores response tokens only"
    got = signature_of(trl_utils.add_fused_lm_head)
    assert got.startswith("model, temperature=1.0"), advice("add_fused_lm_head", "model, temperature=1.0", got, used)
    source = inspect.getsource(trl_utils.add_fused_lm_head)
    head = list(inspect.signature(trl_utils._ChunkedLogProbFunction.forward).parameters)
    wanted = "ctx hidden weight bias targets temperature chunk_size final_logit_softcapping logit_scale outputs".split()
    assert head == wanted, advice("_ChunkedLogProbFunction", wanted, head)
    for name, line in (
        ("add_fused_lm_head", "shift_labels=None"),
        ("_use_triton", "compact = _use_triton(hidden_states.device)"),
        ("_ChunkedLogProbFunction", "per_token = _ChunkedLogProbFunction.apply("),
        ("maybe_gather_lm_head_ctx", "with autocast_ctx, maybe_gather_lm_head_ctx(weight, bias):"),
        (
            "load_balancing_loss_func",
            "from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func",
        ),
    ):
        assert line in source, advice(name, line, "no such line", used if name == "add_fused_lm_head" else "")
    again = inspect.getsource(trl_utils._ChunkedLogProbFunction.backward)
    line = "with maybe_gather_lm_head_ctx(weight, bias):"
    assert line in again, advice("maybe_gather_lm_head_ctx", line, "no such line")

    monkeypatch.setattr(trl_utils, "_use_triton", lambda device: compact)
    model = build_model(tokenizer, family=family, hidden_size=32, heads=2)
    trl_utils.add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy"))
    ids = torch.tensor([[5, 6, 7, 8, 9], [9, 8, 7, 6, 5]])
    labels = torch.tensor([[-100, -100, 7, -100, 9], [-100, 8, -100, -100, -100]])
    targets = labels[:, 1:]
    if shifted:
        out = model(ids, shift_labels=torch.nn.functional.pad(targets, (0, 1), value=-100), fused_lm_head=True)
        log_probs, entropy = out.log_probs[:, :-1], out.entropy[:, :-1]
    else:
        out = model(ids, labels=labels, fused_lm_head=True)
        log_probs, entropy = out.log_probs, out.entropy
    plain = (model(ids).logits[:, :-1] / 0.7).log_softmax(-1)
    scored = targets != -100
    wanted = plain.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(log_probs, wanted * scored, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(entropy, -(plain.exp() * plain).sum(-1) * scored, rtol=1e-4, atol=1e-5)
    assert entropy.requires_grad and log_probs.requires_grad
