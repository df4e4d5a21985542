"""From `model_name_or_path` to a policy and its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from trl import ModelConfig, get_peft_config
from trl.trainer.utils import create_model_from_path

from epo_trl.envs.base import TaskSuite
from epo_trl.models.adapters import Adapter, keep_base, save_whole, whole_weights
from epo_trl.models.corpus import corpus
from epo_trl.models.names import check_model_name
from epo_trl.models.quantized import quantization_of
from epo_trl.models.tiny import DEFAULT_SIZE, build_model, build_tokenizer, tiny_size


def policy_for_training(model_args: ModelConfig, args: Any, suite: TaskSuite, template: str) -> dict[str, Any]:
    """Returns what a trainer of TRL takes: `model`, `processing_class`, `peft_config`, `quantization_config`.

    With `use_peft` an adapter is trained on as it is. Without, it is merged into its base, and all weights are trained.
    A base that is no checkpoint by itself is kept in `output_dir/base`. The reference of a KL term is always the policy
    as it is when the run begins.

    Args:
        model_args: `model_name_or_path` is a Hub id or a local path, of a model or of an adapter, or `"tiny"`: some
            400,000 weights from scratch, with a vocabulary made from the suite's text; `"tiny:192x3"` is 192 wide and
            has 3 layers.
        args: The trainer's configuration. Its `model_init_kwargs` are filled in if TRL is to load the model.
        suite: The tasks.
        template: Name or folder of the prompt template.
    """
    name, adapter = _find(model_args)
    quantization, trust = quantization_of(model_args), {"trust_remote_code": args.trust_remote_code}
    if quantization is not None and not model_args.use_peft:
        raise ValueError("load_in_4bit, load_in_8bit: got True without use_peft; quantized weights are not trained")
    kwargs = {**_init_kwargs(model_args), **(args.model_init_kwargs or {})}
    if tiny_size(name):
        model, tokenizer = _tiny(model_args, suite, template, args.seed)
        if not model_args.use_peft:
            return {"model": model, "processing_class": tokenizer}
        made = model
        model = keep_base(lambda: made, tokenizer, args.output_dir, name)
    else:
        model, tokenizer = name, _tokenizer_of(name, adapter, model_args, **trust)
    if adapter is not None:
        del kwargs["revision"]  # the adapter's, not its base's
        if model_args.use_peft:
            _check_same_lora(model_args, adapter)
            return {
                "model": _to_train_on(adapter, quantization, args, **kwargs, **trust),
                "processing_class": tokenizer,
            }
        with whole_weights():
            model = keep_base(partial(adapter.merged, dtype="auto", **trust), tokenizer, args.output_dir, name)
    args.model_init_kwargs = kwargs
    return {
        "model": model,
        "processing_class": tokenizer,
        "peft_config": _peft_config(model_args, model, **trust),
        "quantization_config": quantization,
    }


def load_policy(
    model_args: ModelConfig,
    suite: TaskSuite,
    template: str,
    *,
    device: Any = "cpu",
    seed: int = 0,
    trust_remote_code: bool = False,
) -> tuple[Any, Any]:
    """Returns a model that is not trained, on its device, and its tokenizer.

    An adapter is merged into its base, or lies on it if that is quantized.

    Args:
        model_args: As for `policy_for_training`.
        suite: The tasks.
        template: Name or folder of the prompt template.
        device: Where to play.
        seed: Seed for the tiny model's weights.
        trust_remote_code: Whether the Hub's own code may run.
    """
    name, adapter = _find(model_args)
    if tiny_size(name):
        model, tokenizer = _tiny(model_args, suite, template, seed)
        return model.to(device), tokenizer
    tokenizer = _tokenizer_of(name, adapter, model_args, trust_remote_code)
    kwargs = {**_init_kwargs(model_args), "trust_remote_code": trust_remote_code}
    quantization = quantization_of(model_args)
    if quantization is not None:
        kwargs |= {"quantization_config": quantization, "device_map": {"": device}}
    if adapter is None:
        model = AutoModelForCausalLM.from_pretrained(name, **kwargs)
    else:
        kwargs.pop("revision")
        if quantization is None:
            model = adapter.merged(**kwargs)
        else:
            kwargs["revision"] = adapter.base_revision
            with adapter.named():
                base = AutoModelForCausalLM.from_pretrained(adapter.base, **kwargs)
            model = adapter.on(base)
    return (model if quantization is not None else model.to(device)).eval(), tokenizer


def merge_adapter(name: str, out: str | Path, *, dtype: str = "auto", trust_remote_code: bool = False) -> Path:
    """Returns `out` after an adapter and its base were written there as one plain checkpoint with its tokenizer.

    Args:
        name: Folder or Hub id of the adapter.
        out: A folder that does not exist or is empty.
        dtype: Data type of the weights, such as "bfloat16"; "auto" uses the base model's.
        trust_remote_code: Whether the Hub's own code may run.
    """
    folder = Path(out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"out: got {folder}, which is there already; expected a new folder")
    model_args = ModelConfig(name)
    _, adapter = _find(model_args)
    if adapter is None:
        raise ValueError(
            f"adapter: got {name}, where there is no adapter_config.json; expected the folder of an adapter"
        )
    tokenizer = _tokenizer_of(name, adapter, model_args, trust_remote_code)
    save_whole(adapter.merged(dtype=dtype, trust_remote_code=trust_remote_code), tokenizer, folder, name)
    return folder


def _find(model_args: ModelConfig) -> tuple[str, Adapter | None]:
    """Returns the name of the model, and the adapter if it is one."""
    check_model_name(model_args.model_name_or_path, revision=model_args.model_revision)
    name: str = model_args.model_name_or_path
    with _named(name):
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
    width, layers = tiny_size(model_args.model_name_or_path) or DEFAULT_SIZE
    model = build_model(tokenizer, hidden_size=width, layers=layers, seed=seed)
    if model_args.attn_implementation is not None:
        model.set_attn_implementation(model_args.attn_implementation)
    return model.to(_init_kwargs(model_args)["dtype"]) if model_args.dtype not in (None, "auto") else model, tokenizer


def _to_train_on(adapter: Adapter, quantization_config: Any, args: Any, **kwargs: Any) -> Any:
    """Returns the base with the adapter on it; only the adapter is trained."""
    if quantization_config is not None:
        kwargs |= {"quantization_config": quantization_config}
    if args.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
        kwargs |= {"device_map": None}
    with adapter.named():
        model = create_model_from_path(adapter.base, revision=adapter.base_revision, **kwargs)
    plugin = args.deepspeed_plugin
    # As TRL does for a new adapter: ZeRO-3 gathers weights of one precision only.
    one_dtype = plugin is not None and plugin.zero_stage == 3 and quantization_config is None
    return adapter.on(model, is_trainable=True, autocast_adapter_dtype=not one_dtype)


def _check_same_lora(model_args: ModelConfig, adapter: Adapter) -> None:
    names = {"lora_r": "r", "lora_alpha": "lora_alpha", "use_dora": "use_dora", "use_rslora": "use_rslora"}
    for name, own in names.items():
        given, saved = getattr(model_args, name), adapter.settings.get(own)
        if given != getattr(ModelConfig(), name) and given != saved:
            raise ValueError(
                f"{name}: got {given}, but the adapter {adapter.name} has {saved} and is trained on as it is; leave it "
                f"out, or merge the adapter and start a new one: epo-trl merge {adapter.name} --out DIR"
            )


def _peft_config(model_args: ModelConfig, name: str, trust_remote_code: bool) -> Any:
    """Returns the settings of a new adapter, or `None`; on every linear layer where PEFT does not know the model."""
    config = get_peft_config(model_args)
    if config is not None and model_args.model_revision not in (None, "main") and not Path(name).is_dir():
        config.revision = model_args.model_revision  # TRL leaves it out, and the adapter is for these weights alone
    if config is not None and config.target_modules is None and config.target_parameters is None:
        from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as KNOWN

        options = {"revision": model_args.model_revision, "trust_remote_code": trust_remote_code}
        if AutoConfig.from_pretrained(name, **options).model_type not in KNOWN:
            config.target_modules = "all-linear"
    return config


def _tokenizer_of(name: str, adapter: Adapter | None, model_args: ModelConfig, trust_remote_code: bool) -> Any:
    """Returns the tokenizer of a model; of an adapter its own, or its base's if it was saved without."""
    trust = {"trust_remote_code": trust_remote_code}
    if adapter is not None and Path(name).is_dir() and not (Path(name) / "tokenizer_config.json").is_file():
        return load_tokenizer(adapter.base, **trust)
    with _named(name, (OSError, ValueError)):  # the second of a folder without a tokenizer
        return load_tokenizer(name, revision=model_args.model_revision, **trust)


@contextmanager
def _named(name: str, errors: tuple[type[Exception], ...] = (OSError,)) -> Iterator[None]:
    """Says which model it is that cannot be read, for these errors."""
    try:
        yield
    except errors as error:
        reason = str(error).split("\n")[0]
        raise ValueError(f"model_name_or_path: got {name!r}, which cannot be read: {reason}") from error


def sequence_limit(config: Any) -> int | None:
    """Returns the longest sequence that a model with this configuration takes, in tokens; `None` for no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def attention_of(model: PreTrainedModel) -> str:
    """Returns the implementation of attention that a model was loaded with, such as "sdpa" or "flash_attention_2"."""
    return model.config._attn_implementation


def tokenizer_of(model_args: ModelConfig) -> Any:
    """Returns the tokenizer of a model or of an adapter, without its weights. The Hub's own code does not run."""
    return _tokenizer_of(*_find(model_args), model_args, trust_remote_code=False)


def load_tokenizer(path: str, **kwargs: Any) -> Any:
    """Returns the tokenizer of a Hub id or a local path, padding on the left.

    Where there is no padding token, the end token is it, as for TRL.

    A local folder whose tokenizer says that it is a plain fast tokenizer is read as one. `AutoTokenizer` would not
    beside every model: for some architectures, Qwen2 among them, it replaces the saved class by the architecture's own.
    """
    config = Path(path) / "tokenizer_config.json"
    if config.is_file():
        saved = json.loads(config.read_text(encoding="utf-8")).get("tokenizer_class")
        if saved in ("PreTrainedTokenizerFast", "TokenizersBackend"):
            return _padding(PreTrainedTokenizerFast.from_pretrained(path, padding_side="left"))
    return _padding(AutoTokenizer.from_pretrained(path, padding_side="left", **kwargs))


def _padding(tokenizer: Any) -> Any:
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
