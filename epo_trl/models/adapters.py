"""Finds LoRA adapters, loads them onto their base model, and merges them into it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils.peft_utils import find_adapter_config_file

from epo_trl.errors import InputError
from epo_trl.models.families import load_model


@dataclass(frozen=True)
class Adapter:
    """An adapter and its base, each by folder or Hub id, and its `adapter_config.json`; `revision` is the adapter's."""

    name: str
    base: str
    settings: dict[str, Any]
    revision: str | None = None

    @classmethod
    def find(cls, name: str, revision: str | None = None) -> Adapter | None:
        """Returns the adapter with that name, or `None` if it is not an adapter's; `InputError` if it names no base."""
        path = find_adapter_config_file(name, revision=revision)
        if path is None:
            return None
        settings = json.loads(Path(path).read_text(encoding="utf-8"))
        base = settings.get("base_model_name_or_path")
        if base is None:
            raise InputError(f"model_name_or_path: got the adapter {name}, which names no base model")
        return cls(name, base, settings, revision)

    @property
    def base_revision(self) -> str:
        """Revision of the base that the adapter was trained on, as recorded by PEFT."""
        return self.settings.get("revision") or "main"

    def on(self, model: Any, **kwargs: Any) -> Any:
        """Loads the adapter onto the model and returns the PEFT model.

        Raises:
            InputError: If the adapter's weights belong to another model.
        """
        from peft import PeftModel

        both = PeftModel.from_pretrained(model, self.name, revision=self.revision, **kwargs)
        result = both.load_adapter(self.name, "default", revision=self.revision, **kwargs)  # PEFT only warns
        if wrong := [*result.missing_keys, *result.unexpected_keys]:
            raise InputError(
                f"model_name_or_path: expected an adapter with the weights of its base {self.base}, got {self.name}, "
                f"which does not fit {len(wrong)} of them, such as {', '.join(wrong[:2])}"
            )
        both.adapter_source = self.name if Path(self.name).is_dir() else f"{self.name}@{self.revision or 'main'}"
        return both

    def load_base(self, load: Callable[..., Any] = load_model, **kwargs: Any) -> Any:
        """Loads the base, without the adapter, by a function of its name, with further arguments of that."""
        return load(self.base, revision=self.base_revision, **kwargs)

    def merged(self, **kwargs: Any) -> Any:
        """Loads the base and merges the adapter into its weights; see `load_base` and `on`.

        A head that shares its weights with the embedding gets its own if the adapter changes one of the two.
        """
        model = self.on(self.load_base(**kwargs))
        if is_adapted(model.get_input_embeddings()) or is_adapted(model.get_output_embeddings()):
            _untie(model)
        return model.merge_and_unload(safe_merge=True)


def is_adapted(layer: Any) -> bool:
    """Returns whether merging an adapter would change a layer."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return isinstance(layer, BaseTunerLayer)


@contextmanager
def keeping_base(model: Any) -> Iterator[None]:
    """Restores the base to the bit after a block that merges an adapter into it and unmerges it again, by copies.

    PEFT subtracts what it has added. In bf16 both are rounded, so the base would change with every merge. ZeRO-3 does
    not write back what the block gathers. A critic in the model is not merged.
    """
    bases = [layer.get_base_layer() for layer in model.modules() if is_adapted(layer)]
    weights = [(base, *named) for base in bases for named in base.named_parameters(recurse=False)]
    values = [weight.data.clone() if weight.is_floating_point() else None for *_, weight in weights]
    yield
    for (base, name, weight), value in zip(weights, values, strict=True):
        setattr(base, name, weight)  # a quantized weight is replaced, others change in place
        if value is not None:
            weight.data.copy_(value)


def _untie(model: Any) -> None:
    """Gives the head its own copy of the weights that it shares with the embedding."""
    if getattr(model.config, "tie_word_embeddings", False):
        head = model.get_output_embeddings()
        head = head.get_base_layer() if is_adapted(head) else head
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)
        model.config.tie_word_embeddings = model.config.get_text_config().tie_word_embeddings = False
