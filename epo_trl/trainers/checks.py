"""What can be known to be wrong before training starts."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from accelerate.utils import is_peft_model, parse_flag_from_env
from trl import GRPOTrainer

from epo_trl.methods import Methods
from epo_trl.models import load_tokenizer
from epo_trl.models.load import sequence_limit
from epo_trl.rollout import ContextBuilder
from epo_trl.trainers.config import EPOConfig


def check_tokenizer(tokenizer: Any) -> None:
    """Raises `ValueError` if the tokenizer cannot mark padding or the end of a turn."""
    for token in ("pad_token", "eos_token"):
        if getattr(tokenizer, token, None) is None:
            raise ValueError(
                f"processing_class: the tokenizer has no {token}; set one that is not used for anything else, for "
                f"example `tokenizer.{token} = '<|endoftext|>'` for a Qwen model"
            )


def check_settings(args: EPOConfig, context: ContextBuilder) -> None:
    """Raises `ValueError` for, or warns of, settings that do not go with the chat template or each other."""
    warn_of_scale(args)
    check_sampling(args)
    check_masters(args)
    warn_of_empty_thought(args, context)


def check_reference(args: EPOConfig, methods: Methods, model: Any, peft_config: Any) -> None:
    """Raises `ValueError` if TRL is to load a reference model from a path that the model does not have."""
    readers = methods.readers_of_reference
    if not (args.beta or readers) or isinstance(model, str) or peft_config is not None or is_peft_model(model):
        return
    if not model.config.name_or_path:
        slot = "credit" if args.credit in readers else "entropy_method"
        field = f"beta: got {args.beta}" if args.beta else f"{slot}: got {readers[0]!r}"
        raise ValueError(
            f"{field}, for which the reference model is loaded from where the policy came from, but this model was "
            "made in memory; save the model and pass its path, or do without a reference"
        )


def warn_of_scale(args: EPOConfig) -> None:
    """Warns of a loss of TRL's whose scale is another where a sequence is an episode of several turns."""
    if args.process_index:
        return
    turn, tokens = args.max_completion_length, args.max_turns * args.max_completion_length
    if args.loss_type == "dr_grpo":
        warnings.warn(
            "loss_type: got 'dr_grpo', which divides the sum over an episode's tokens by max_completion_length "
            f"({turn}). That is the longest response of one turn here, so policy loss and KL are up to max_turns "
            f"({args.max_turns}) times too large, and the entropy terms, which are means, that much too small beside "
            "them. Take loss_type: dapo (a mean over tokens), or divide learning_rate and multiply epo_lambda by the "
            "turns of an episode.",
            stacklevel=2,
        )
    if args.loss_type == "luspo":
        warnings.warn(
            "loss_type: got 'luspo', which sums over an episode's tokens without a divisor: policy loss and KL are as "
            "many times those of loss_type: dapo as an episode has tokens, up to max_turns * max_completion_length "
            f"({tokens}), and the entropy terms, which are means, that much too small beside them. Take loss_type: "
            "dapo, which weighs tokens against each other as 'luspo' does, or multiply epo_lambda and max_grad_norm "
            "by the tokens of an episode.",
            stacklevel=2,
        )
    if args.loss_type == "vespo" and _ratios_differ_from_1(args) and (weight := vespo_weight(args, tokens)) < 0.1:
        warnings.warn(
            "loss_type: got 'vespo', which weighs an episode by the product of its tokens' ratios, over all turns up "
            f"to max_turns * max_completion_length ({tokens}) factors: an episode of that length whose tokens all have "
            f"a ratio of {_SOME_RATIO} weighs {weight:.0e} and teaches nothing. Take loss_type: dapo, which clips each "
            "token's ratio, or policy_method: gspo with it, which has one ratio for each turn; or make one update on "
            "each batch (num_iterations: 1, steps_per_generation as gradient_accumulation_steps).",
            stacklevel=2,
        )


_SOME_RATIO = 0.95  # of a token after an update, as an example


def vespo_weight(args: EPOConfig, tokens: int) -> float:
    """Returns TRL's weight of an episode with a positive advantage, all of whose tokens have the example's ratio."""
    one = torch.ones(1, tokens)
    weight = GRPOTrainer.get_gamma_weights(
        one[:, :1], math.log(_SOME_RATIO) * one, one, None, k_pos=args.vespo_k_pos, lambda_pos=args.vespo_lambda_pos
    )
    return float(weight)


def _ratios_differ_from_1(args: EPOConfig) -> bool:
    """Returns whether a batch serves several updates, or was sampled by vLLM, which rounds otherwise."""
    several = args.num_iterations > 1 or args.steps_per_generation > args.gradient_accumulation_steps
    return several or args.use_vllm and args.vllm_importance_sampling_correction


def check_masters(args: EPOConfig) -> None:
    """Raises `ValueError` if generation would leave the weights in half precision.

    For continuous batching TRL casts the policy. `keeping_precision` restores it, but not what FSDP has split.
    """
    half = "bf16" if args.bf16 else "fp16" if args.fp16 else ""
    is_split = args.fsdp or parse_flag_from_env("ACCELERATE_USE_FSDP")
    if args.use_transformers_continuous_batching and half and is_split:
        raise ValueError(
            f"use_transformers_continuous_batching: expected False with {half} under FSDP, got True: TRL casts the "
            f"weights to {half} for good; set it to False, or use_vllm to True, or take ZeRO or DDP"
        )


# What leaves the model's whole distribution as it is; the first value is what we advise.
_OFF: dict[str, tuple[Any, ...]] = {
    "top_p": (1.0,),
    "top_k": (0, None, -1),
    "min_p": (None, 0.0),
    "repetition_penalty": (1.0,),
}
_FIXED: dict[str, Any] = {
    **{"do_sample": True, "num_beams": 1, "num_return_sequences": 1, "n": 1, "return_dict_in_generate": False},
    **dict.fromkeys(("eos_token_id", "stop_token_ids", "stop", "stop_strings")),
}


def check_sampling(args: EPOConfig) -> None:
    """Raises `ValueError` if `generation_kwargs` go round a setting of ours; warns if not every token can be sampled.

    The loss has to know how responses were sampled, so each of these has one place where it is set.
    """
    own = {name: name for name in (*_OFF, "temperature", "cache_implementation")}
    own |= dict.fromkeys(("max_new_tokens", "max_tokens", "max_length"), "max_completion_length")
    given: dict[str, Any] = args.generation_kwargs or {}
    for name, value in given.items():
        if name in own and value != getattr(args, own[name]):
            raise ValueError(
                f"generation_kwargs: got {name}={value!r}, which generation would follow and the loss would not know "
                f"of ({own[name]} is {getattr(args, own[name])!r}); set {own[name]} instead"
            )
        if name in _FIXED and value != _FIXED[name]:
            raise ValueError(
                f"generation_kwargs: got {name}={value!r}, takes no {name}: the loss is that of one sampled response "
                "to each prompt, which ends where the model's own end tokens end it"
            )
    changed = {name: getattr(args, name) for name, off in _OFF.items() if getattr(args, name) not in off}
    if changed and args.process_index == 0:
        warnings.warn(
            f"{', '.join(changed)}: got {', '.join(map(str, changed.values()))}, so responses are drawn from another "
            "distribution than the one that the loss and the entropy terms compute: log-probabilities differ, and "
            "entropy is rewarded on tokens that cannot be sampled. For training set "
            + ", ".join(f"{name}={_OFF[name][0]}" for name in changed),
            stacklevel=3,
        )


def warn_of_empty_thought(args: EPOConfig, context: ContextBuilder) -> None:
    """Warns if the chat template has closed the reasoning before the policy says a word, and reasoning is required."""
    if args.require_think and context.has_empty_thought and args.process_index == 0:
        warnings.warn(
            "require_think: got True, but the chat template begins every answer with an empty <think> </think> block, "
            "so a model that thinks no more after it has all its actions counted as invalid. Set require_think=False, "
            "or turn thinking on, for most models by chat_template_kwargs={'enable_thinking': True}",
            stacklevel=3,
        )


def check_packing(model: Any, attention: str) -> None:
    """Raises `ValueError` if sequences that are packed into one row reach each other; warns if padding is faster.

    Architectures differ: some have recurrent states or convolutions, some do not look at positions for their mask. So
    the model is asked: the same sequence twice in a row has to give the same logits twice, up to the square root of the
    rounding error (bfloat16: 9 %, float32: 0.03 %). Collective under ZeRO-3.

    Args:
        model: Ready to run.
        attention: Its implementation, such as "flash_attention_2".
    """
    if "flash" not in attention:
        warnings.warn(
            f"pack_turns: {attention!r} attention works on the whole row and masks most of it; flash attention skips "
            "it. With this one turn_buckets is faster.",
            stacklevel=2,
        )
    device, training = next(model.parameters()).device, model.training
    sequence, positions = torch.tensor([[5, 3, 7, 2, 6]], device=device), torch.arange(5, device=device)
    model.eval()
    with torch.no_grad():
        ids, places = sequence.repeat(1, 2), positions.repeat(2)[None]
        first, second = model(input_ids=ids, position_ids=places, use_cache=False).logits.chunk(2, dim=1)
    model.train(training)
    difference = (first - second).float().norm() / first.float().norm()
    if not difference <= _rounding(model, first.dtype) ** 0.5:
        raise ValueError(
            "pack_turns: got True with a model that does not keep the turns of a row apart: the same turn twice "
            f"differs by {difference:.1%}; takes a model whose attention goes by position_ids, or pack_turns=False"
        )


def _rounding(model: Any, output: torch.dtype) -> float:
    """Returns the relative rounding error of the coarsest type that the model computes in.

    Under autocast weights and outputs can be float32 where the layers compute in bfloat16.
    """
    weight = next(model.parameters())
    dtypes, device = {output, weight.dtype}, weight.device.type
    if torch.is_autocast_enabled(device):
        dtypes.add(torch.get_autocast_dtype(device))
    return max(torch.finfo(dtype).eps for dtype in dtypes)


def check_context_fits(args: EPOConfig, context: ContextBuilder, model_config: Any) -> int | None:
    """Returns the longest sequence that the model takes, in tokens, or `None` if it has no limit.

    Raises:
        ValueError: If one turn (windowed), or `max_turns` responses after the first prompt (concatenated), cannot fit.
    """
    limits = {
        "max_position_embeddings": sequence_limit(model_config),
        "vllm_max_model_length": args.vllm_max_model_length if args.use_vllm else None,
    }
    known = {name: limit for name, limit in limits.items() if limit is not None}
    if not known:
        return None
    name = min(known, key=lambda key: known[key])
    turns = 1 if context.is_windowed else args.max_turns
    needed = args.max_prompt_length + turns * args.max_completion_length
    if needed > known[name]:
        per_turn = f"{turns} x " if turns > 1 else ""
        advice = "max_prompt_length, max_completion_length"
        if turns > 1:
            advice += " or max_turns, or take context='windowed'"
        raise ValueError(
            f"max_turns, max_prompt_length, max_completion_length: {args.context} context needs at least "
            f"{args.max_prompt_length} + {per_turn}{args.max_completion_length} = {needed} tokens, but {name} is "
            f"{known[name]}; lower {advice}"
        )
    return known[name]


def check_backbone(critic: str, model: Any, peft_config: Any) -> None:
    """Raises `ValueError` if there is no transformer that a critic could be made from, or put on.

    Args:
        critic: `"separate"` or `"value_head"`.
        model: The policy, without an adapter around it.
        peft_config: Of the policy's adapter, or `None`.
    """
    if model.base_model is model:
        raise ValueError(
            f"critic: got {critic!r}, takes a policy whose transformer can be told from its LM head, but "
            f"{type(model).__name__}.base_model is the model itself (base_model_prefix={model.base_model_prefix!r})"
        )
    if critic == "value_head" and getattr(peft_config, "is_prompt_learning", False):
        raise ValueError(
            f"critic: got 'value_head' with {type(peft_config).__name__}, whose virtual tokens are no part of the text "
            "that is valued; takes 'separate'"
        )


def check_critic_vocabulary(path: str, vocabulary_size: int, tokenizer: Any, **kwargs: Any) -> None:
    """Raises `ValueError` if a critic cannot read the policy's tokens.

    Args:
        path: What `critic_model_name_or_path` names.
        vocabulary_size: Rows of the critic's embedding.
        tokenizer: The policy's.
        **kwargs: For loading the critic's tokenizer.
    """
    needed = len(tokenizer)
    if vocabulary_size < needed:
        raise ValueError(
            f"critic_model_name_or_path: got {path!r} with a vocabulary of {vocabulary_size} tokens, takes a model "
            f"with the policy's tokenizer, which has {needed}"
        )
    try:
        own = load_tokenizer(path, **kwargs)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"critic_model_name_or_path: got {path!r}, whose tokenizer cannot be read ({error}); takes a model that "
            "was saved with its tokenizer, which has to be the policy's"
        ) from error
    if own.get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"critic_model_name_or_path: got {path!r}, whose tokenizer gives other ids to the same text; takes a model "
            "with the policy's tokenizer"
        )
