"""Loads a policy and its tokenizer from `model_name_or_path`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast
from trl import ModelConfig, get_peft_config, get_quantization_config
from trl.trainer.utils import create_model_from_path

from epo_trl.envs.base import TaskSuite
from epo_trl.errors import InputError
from epo_trl.models.adapters import Adapter
from epo_trl.models.corpus import corpus
from epo_trl.models.families import load_model
from epo_trl.models.generate import end_ids
from epo_trl.models.tiny import DEFAULT_SIZE, HEADS, build_model, build_tokenizer
from epo_trl.runs.files import checkpoints, last_checkpoint
from epo_trl.runs.run_settings import uses_zero3

COPIES = ":copy"  # the end of the name of a tiny model that starts to copy
CONFIGS = ("config.json", "adapter_config.json")  # of a model, of an adapter
TOKENIZER = "tokenizer_config.json"


def policy_for_training(model_args: ModelConfig, args: Any, suite: TaskSuite, template: str) -> dict[str, Any]:
    """Prepares the arguments of a TRL trainer: `model`, `processing_class`, `peft_config`, `quantization_config`.

    Training continues an adapter. The reference policy of a KL term is always the policy at the start of the run.

    Args:
        model_args: Model settings. `model_name_or_path` is a Hub id or a local path of a model or an adapter, or
            `"tiny"`: about 400,000 weights from scratch, with a vocabulary made from the suite's text. `"tiny:192x3"`
            has width 192 and 3 layers, `"tiny:copy"` and `"tiny:192x3:copy"` start to copy.
        args: Configuration of the trainer. Its `model_init_kwargs` are set if TRL is to load the model.
        suite: Task suite.
        template: Name or folder of the prompt template.
    """
    name, adapter = _find(model_args)
    quantization, trust = get_quantization_config(model_args), {"trust_remote_code": args.trust_remote_code}
    if quantization is not None and not model_args.use_peft:
        raise InputError("load_in_4bit, load_in_8bit: got True without use_peft; quantized weights are not trained")
    kwargs = {**_init_kwargs(model_args), **(args.model_init_kwargs or {})}
    if tiny_size(name):
        if model_args.use_peft:
            raise InputError(f"use_peft: expected False with {name!r}, whose weights are random, got True")
        model, tokenizer = _tiny(model_args, suite, template, args.seed)
        return {"model": model, "processing_class": tokenizer}
    check_output_dir(args.output_dir, name, adapter.base if adapter else None)
    tokenizer = tokenizer_of(model_args, **trust)
    if adapter is not None:
        if not model_args.use_peft:
            raise InputError(
                f"use_peft: expected True to train the adapter {name}, got False; to train all weights, merge it "
                f"first: epo-trl merge {name} --out DIR"
            )
        _check_same_lora(model_args, adapter)
        del kwargs["revision"]  # this is the adapter's revision, not its base's
        model = _to_train_on(adapter, quantization, args, **kwargs, **trust)
        return {"model": model, "processing_class": tokenizer}
    args.model_init_kwargs = kwargs
    return {
        "model": name,
        "processing_class": tokenizer,
        "peft_config": _peft_config(model_args, name, **trust) if model_args.use_peft else None,
        "quantization_config": quantization,
    }


def tiny_size(name: str | None) -> tuple[int, int] | None:
    """Parses width and layers from `"tiny"` or, for example, `"tiny:192x3:copy"`; `None` for any other model name."""
    kind, colon, size = str(name).removesuffix(COPIES).partition(":")
    if kind != "tiny":
        return None
    if not colon:
        return DEFAULT_SIZE
    match = re.fullmatch(r"([1-9][0-9]{0,3})x([1-9][0-9]?)", size)
    if match is None or int(match[1]) % (2 * HEADS):
        raise InputError(
            f"model_name_or_path: got {name!r}; expected 'tiny', or a width, a multiple of {2 * HEADS}, and a number "
            "of layers, as in 'tiny:192x3' or 'tiny:192x3:copy'"
        )
    return int(match[1]), int(match[2])


def check_model_name(name: str | None, field: str = "model_name_or_path") -> None:
    """Raises `InputError` if a name is a path but not the folder of a model; a Hub id is left to transformers."""
    if not name:
        raise InputError(f"{field}: expected a Hub id, a local path or 'tiny', got nothing")
    folder = Path(name)
    is_path = folder.is_dir() or name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1
    if is_path and not tiny_size(name) and not any((folder / file).is_file() for file in (*CONFIGS, TOKENIZER)):
        hint = f"; its last checkpoint is {saved}" if (saved := last_checkpoint(name)) else ""
        raise InputError(f"{field}: got {name!r}, which cannot be read: no folder with {' or '.join(CONFIGS)}{hint}")


def check_output_dir(output_dir: str, *models: str | None) -> None:
    """Raises `InputError` for a run in the folder of a model, or of the run that saved the model as a checkpoint.

    It would replace the results of that run. A model made in memory is `None` or `""`.
    """
    folder = Path(output_dir).resolve()
    for model in filter(None, models):
        if Path(model).resolve() in (folder, *checkpoints(folder)):
            raise InputError(
                f"output_dir: expected another folder than that of the model, got {output_dir} for the model {model}"
            )


def load_policy(
    model_args: ModelConfig,
    suite: TaskSuite,
    template: str,
    *,
    device: Any = "cpu",
    seed: int = 0,
    trust_remote_code: bool = False,
) -> tuple[Any, Any]:
    """Loads a model for inference on the device, and its tokenizer; see `policy_for_training` for the arguments.

    An adapter is merged into its base, or loaded onto it if the base is quantized. `seed` is that of tiny weights.
    """
    name, adapter = _find(model_args)
    if tiny_size(name):
        model, tokenizer = _tiny(model_args, suite, template, seed)
        return model.to(device), tokenizer
    tokenizer = tokenizer_of(model_args, trust_remote_code)
    kwargs = {**_init_kwargs(model_args), "trust_remote_code": trust_remote_code}
    quantization = get_quantization_config(model_args)
    if quantization is not None:
        kwargs |= {"quantization_config": quantization, "device_map": {"": device}}
    if adapter is None:
        model = load_model(name, **kwargs)
    else:
        del kwargs["revision"]  # this is the adapter's revision, not its base's
        model = adapter.merged(**kwargs) if quantization is None else adapter.on(adapter.load_base(**kwargs))
    return (model if quantization is not None else model.to(device)).eval(), tokenizer


def merge_adapter(name: str, out: str | Path, *, dtype: str = "auto", trust_remote_code: bool = False) -> Path:
    """Merges an adapter into its base and saves a plain checkpoint with its tokenizer; returns the folder.

    `out` does not exist or is empty. With the `dtype` `"auto"` the weights have the base model's.
    """
    folder = Path(out).resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"out: expected a new folder, got {out}, which is there already")
    model_args = ModelConfig(name)
    _, adapter = _find(model_args)
    if adapter is None:
        raise InputError(
            f"adapter: got {name}, where there is no adapter_config.json; expected the folder of an adapter"
        )
    tokenizer = tokenizer_of(model_args, trust_remote_code)
    adapter.merged(dtype=dtype, trust_remote_code=trust_remote_code).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _find(model_args: ModelConfig) -> tuple[str, Adapter | None]:
    """Returns the name of the model, and the adapter if the name is an adapter's."""
    check_model_name(model_args.model_name_or_path)
    name: str = model_args.model_name_or_path
    return name, None if tiny_size(name) else Adapter.find(name, model_args.model_revision)


def _init_kwargs(model_args: ModelConfig) -> dict[str, Any]:
    dtype = model_args.dtype
    return {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": getattr(torch, dtype) if dtype not in (None, "auto") else dtype,
    }


def _tiny(model_args: ModelConfig, suite: TaskSuite, template: str, seed: int) -> tuple[PreTrainedModel, Any]:
    tokenizer = build_tokenizer(corpus(suite, template))
    name = str(model_args.model_name_or_path)
    width, layers = tiny_size(name) or DEFAULT_SIZE
    model = build_model(tokenizer, hidden_size=width, layers=layers, seed=seed, copies=name.endswith(COPIES))
    if model_args.attn_implementation is not None:
        model.set_attn_implementation(model_args.attn_implementation)
    dtype = _init_kwargs(model_args)["dtype"]
    return model.to(dtype) if isinstance(dtype, torch.dtype) else model, tokenizer


def _to_train_on(adapter: Adapter, quantization_config: Any, args: Any, **kwargs: Any) -> Any:
    """Loads the base with the adapter on it; only the adapter is trained."""
    if quantization_config is not None:
        kwargs |= {"quantization_config": quantization_config}
    if args.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
        kwargs |= {"device_map": None}
    model = adapter.load_base(create_model_from_path, **kwargs)
    # As in TRL for a new adapter: ZeRO-3 gathers weights of one precision only.
    one_dtype = uses_zero3(args) and quantization_config is None
    return adapter.on(model, is_trainable=True, autocast_adapter_dtype=not one_dtype)


# Options of TRL; in an adapter's settings, some have no `lora_` in their names.
_LORA = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_parameters",
         "lora_modules_to_save", "use_dora", "use_rslora")  # fmt: skip


def _check_same_lora(model_args: ModelConfig, adapter: Adapter) -> None:
    """Raises `InputError` for a setting that the adapter does not have."""
    for name in _LORA:
        given = getattr(model_args, name)
        saved = adapter.settings.get(name, adapter.settings.get(name.removeprefix("lora_")))
        # PEFT saves names in any order and writes `all-linear` out; TRL unpacks a single name.
        one, other = (set(value) if isinstance(value, list) else {value} for value in (given, saved))
        if given not in (getattr(ModelConfig(), name), "all-linear") and one != other:
            raise InputError(
                f"{name}: expected {saved}, as in the adapter {adapter.name}, got {given}; omit it, or merge the "
                f"adapter and start a new one: epo-trl merge {adapter.name} --out DIR"
            )


_MAMBA = ("falcon_h1", "falcon_mamba", "mamba", "mamba2")


def _peft_config(model_args: ModelConfig, name: str, trust_remote_code: bool) -> Any:
    """Returns the configuration of a new adapter; targets all linear layers if PEFT has no default."""
    config, revision = get_peft_config(model_args), model_args.model_revision
    if revision not in (None, "main") and not Path(name).is_dir():
        config.revision = revision  # TRL omits it, but the adapter fits only these weights
    if config.target_modules is None and config.target_parameters is None:
        from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as KNOWN

        kind = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code).model_type
        config.target_modules = KNOWN.get(kind, "all-linear")
        if kind in _MAMBA and kind not in KNOWN:
            config.exclude_modules = ["out_proj"]  # PEFT refuses it there
    return config


def tokenizer_of(model_args: ModelConfig, trust_remote_code: bool = False) -> Any:
    """Loads the tokenizer of a model or an adapter without its weights; an adapter without one has its base's."""
    (name, adapter), trust = _find(model_args), {"trust_remote_code": trust_remote_code}
    try:
        return load_tokenizer(name, revision=model_args.model_revision, **trust)
    except (OSError, ValueError) as error:
        if adapter is not None:
            return load_tokenizer(adapter.base, revision=adapter.base_revision, **trust)
        reason = str(error).split("\n")[0]
        raise InputError(f"model_name_or_path: got {name!r}, whose tokenizer cannot be read: {reason}") from error


def sequence_limit(config: Any) -> int | None:
    """Returns the maximum sequence length of a model configuration in tokens; `None` for no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def end_ids_of(model_args: ModelConfig, tokenizer: Any, trust_remote_code: bool = False) -> list[int]:
    """Returns the tokens that end a response of a model or an adapter, without loading its weights."""
    if tiny_size(model_args.model_name_or_path):
        return end_ids(tokenizer, None)
    name, revision = _find_weights(model_args)
    try:
        own = GenerationConfig.from_pretrained(name, revision=revision)
    except OSError:  # as `from_pretrained` of a model without that file
        own = GenerationConfig.from_model_config(config_of(model_args, trust_remote_code))
    return end_ids(tokenizer, own.eos_token_id)


def config_of(model_args: ModelConfig, trust_remote_code: bool = False) -> Any:
    """Loads the configuration of a saved model, or of the base of an adapter."""
    name, revision = _find_weights(model_args)
    return AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)


def _find_weights(model_args: ModelConfig) -> tuple[str, str | None]:
    """Returns name and revision of a saved model, or of the base of an adapter."""
    name, adapter = _find(model_args)
    return (name, model_args.model_revision) if adapter is None else (adapter.base, adapter.base_revision)


def load_tokenizer(path: str, **kwargs: Any) -> Any:
    """Loads the tokenizer of a Hub id or a local path; pads on the left, as in TRL with the end token if it has none.

    A local tokenizer saved as a plain fast tokenizer is loaded as one. `AutoTokenizer` does not always do so: for some
    architectures, such as Qwen2, it replaces the saved class by the architecture's own.
    """
    config = Path(path) / TOKENIZER
    saved = json.loads(config.read_text(encoding="utf-8")).get("tokenizer_class") if config.is_file() else None
    if saved in ("PreTrainedTokenizerFast", "TokenizersBackend"):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(path, padding_side="left")
    else:
        tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left", **kwargs)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
