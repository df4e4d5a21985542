"""What differs between model families: the class of a checkpoint, the part that text reaches, noise in training.

TRL trains a checkpoint as its own class, the one that its `config.json` names. For a family that also reads images or
sound, `AutoModelForCausalLM` is another class with other names of weights, or none at all.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig
from trl.trainer.utils import create_model_from_path

# Settings and attributes that make a model in training mode draw random numbers: dropout, LayerDrop, router jitter.
_NOISE = re.compile("drop|jitter")
# The name by which TRL's fused head reads the number of experts, and those of some families.
_EXPERTS, _OTHER_NAMES = "num_experts", ("num_local_experts", "n_routed_experts")


def load_model(name: str, **kwargs: Any) -> Any:
    """Loads a checkpoint as its own class, as TRL does, with arguments of `from_pretrained`."""
    return create_model_from_path(name, **{"device_map": None, **kwargs})


def unread_by_text(model: Any) -> list[nn.Parameter]:
    """Returns the parameters that a text-only input never reaches, such as a vision tower.

    The model may have no LM head, and has no wrapper of PEFT.
    """
    if model.config.get_text_config() is model.config:  # its family reads nothing but text
        return []
    decoder = model.get_decoder()
    # Llama 3.2 Vision skips these layers where there is no image.
    cross_attention = getattr(decoder.config, "cross_attention_layers", None) or ()
    skipped = [layer for i, layer in enumerate(decoder.layers) if i in cross_attention] if cross_attention else []
    parts = filter(None, (decoder, model.get_input_embeddings(), model.get_output_embeddings()))
    read = {id(weight) for part in parts for weight in part.parameters()}
    read -= {id(weight) for layer in skipped for weight in layer.parameters()}
    return [weight for weight in model.parameters() if id(weight) not in read]


def freeze_unread(model: Any, *, quiet: bool = False) -> None:
    """Freezes what text never reaches, also in an adapter: it would take optimizer state, and DDP waits for it."""
    unread = [weight for weight in unread_by_text(model) if weight.requires_grad]
    for weight in unread:
        weight.requires_grad_(False)
    if unread and not quiet:
        count = sum(getattr(weight, "ds_numel", weight.numel()) for weight in unread)
        warnings.warn(
            f"{type(model).__name__}: frozen, since text never reaches it: {', '.join(_unread_modules(model))} "
            f"({count / 1e6:,.1f} million weights)",
            stacklevel=2,
        )


def _unread_modules(model: Any) -> list[str]:
    """Returns the names of the outermost modules that hold only what text never reaches."""
    unread = {id(weight) for weight in unread_by_text(model)}

    def walk(module: nn.Module, name: str) -> Iterator[str]:
        ids = {id(weight) for weight in module.parameters()}
        if ids and ids <= unread:
            yield name
        elif ids & unread:
            for child, part in module.named_children():
                yield from walk(part, child)

    return list(dict.fromkeys(walk(model, ""))) if unread else []


def without_weights(name: str, **kwargs: Any) -> Any:
    """Builds the model of a checkpoint without its weights, or returns `None` for a family that only reads text."""
    config = AutoConfig.from_pretrained(name, **kwargs)
    kind = getattr(transformers, (config.architectures or [""])[0], None)
    if kind is None or config.get_text_config() is config:
        return None
    with torch.device("meta"):
        return kind(config)


def fitted(peft_config: Any, model: Any, *, dropout: bool, **kwargs: Any) -> Any:
    """Returns the configuration of a new adapter without what it must not have in this run.

    That is layers that text never reaches, unless the configuration excludes modules itself, and without `dropout` its
    dropout, which PEFT refuses on the packed experts of a mixture. The model may be given by name, with arguments of
    `AutoConfig.from_pretrained`.
    """
    made = copy.copy(peft_config)
    if not dropout and hasattr(made, "lora_dropout"):
        made.lora_dropout = 0.0
    if getattr(made, "exclude_modules", ()) is None:
        whole = without_weights(model, **kwargs) if isinstance(model, str) else model
        names = [] if whole is None else _unread_modules(whole)
        if names:
            made.exclude_modules = rf"(.*\.)?({'|'.join(map(re.escape, names))})(\..*)?"
    return made


# Settings of a configuration: the object, the name, and the value as published.
Changed = list[tuple[Any, str, float]]


def turn_off_noise(model: Any) -> Changed:
    """Turns off dropout of every kind, so that training mode computes what evaluation mode does.

    transformers applies it by modules, or by functions whose rate is an attribute of a module or a setting. Returns the
    settings that were changed.
    """
    changed: Changed = []
    for module in model.modules():
        if "dropout" in type(module).__name__.lower() and hasattr(module, "p"):
            module.p = 0.0
        for name, _ in _noisy(module):
            setattr(module, name, 0.0)
        for name, value in _noisy(config := getattr(module, "config", None)):
            changed.append((config, name, value))
            setattr(config, name, 0.0)
    return changed


def _noisy(owner: Any) -> list[tuple[str, float]]:
    values = getattr(owner, "__dict__", {})
    return [
        (name, value) for name, value in values.items() if isinstance(value, float) and value and _NOISE.search(name)
    ]


@contextmanager
def as_published(changed: Changed) -> Iterator[None]:
    """Restores what `turn_off_noise` has changed in a configuration, to save it as it was published."""
    for config, name, value in changed:
        setattr(config, name, value)
    try:
        yield
    finally:
        for config, name, _ in changed:
            setattr(config, name, 0.0)


def settle_experts(config: Any) -> bool:
    """Lets TRL find the number of experts of a model under the name that it reads, by an alias of transformers.

    Returns whether a router loss is possible: a dense model of a family of mixtures, as Granite 4.0 350M, has none.
    """
    text = config.get_text_config()
    known = [name for name in _OTHER_NAMES if hasattr(text, name)]
    if known and not hasattr(text, _EXPERTS):
        type(text).attribute_map = {**type(text).attribute_map, _EXPERTS: known[0]}
    has_router = getattr(text, _EXPERTS, None) != 0
    if not has_router:
        text.output_router_logits = False
    return has_router
