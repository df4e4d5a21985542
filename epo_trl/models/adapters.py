"""Finds LoRA adapters, loads them onto their base model, and merges them into it.

An adapter needs its base model. If the base was built in memory and is not a checkpoint elsewhere, it is saved next to
the adapter in a folder `base`.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils.peft_utils import find_adapter_config_file

from epo_trl.errors import InputError
from epo_trl.models.families import load_model
from epo_trl.runs.checkpoint_files import FINISHED, what_model
from epo_trl.runs.run_lock import on_main_process

BASE = "base"
NOTE = "made_from.txt"
_CHECKPOINT = re.compile(r"last-checkpoint|checkpoint-\d+")


@dataclass(frozen=True)
class Adapter:
    """An adapter and its base, each by folder or Hub id, and the contents of its `adapter_config.json`.

    `revision` is the adapter's; the base has another.
    """

    name: str
    base: str
    settings: dict[str, Any]
    revision: str | None = None

    @classmethod
    def find(cls, name: str, revision: str | None = None) -> Adapter | None:
        """Returns the adapter with that name, or `None` if the name is not an adapter's.

        Its base is next to it if it was saved there, else where the adapter recorded it.

        Raises:
            InputError: If it names no base.
        """
        path = find_adapter_config_file(name, revision=revision)
        if path is None:
            return None
        settings = json.loads(Path(path).read_text(encoding="utf-8"))
        base, folder = settings.get("base_model_name_or_path"), Path(name)
        if base is None or Path(base).name == BASE:
            beside_run = [folder.resolve().parent / BASE] if _CHECKPOINT.fullmatch(folder.resolve().name) else []
            places = [at for at in (folder / BASE, *beside_run) if (at / "config.json").is_file()]
            base = str(places[0]) if places else base
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
        both.peft_config["default"].base_model_name_or_path = self.base  # where it was found, so that saving records it
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
    """Restores the base to the bit where the block merges an adapter into it and unmerges it again, by copies.

    PEFT subtracts what it has added. In bf16 both are rounded, so the base would change with every merge.
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


def keep_base(args: Any, model: Any, tokenizer: Any, source: str) -> str:
    """Saves a model made in memory in the run's folder `base`, in the main process; returns that folder. Collective.

    A run that has a checkpoint or is finished keeps its original base. `source` is what the model was made from.

    Raises:
        InputError: On every rank, if the folder is of a run with another model, or of none.
    """
    folder = Path(args.output_dir) / BASE

    def keep() -> None:
        made = made_from(folder)
        begun = (folder.parent / FINISHED).exists() or any(folder.parent.glob("checkpoint-*"))
        if folder.exists() and (not made or begun and made[-1] != what_model(source)):
            raise InputError(f"output_dir: expected no folder {BASE} of another model in it, got {args.output_dir}")
        if not (made and begun):
            save_whole(model, tokenizer, folder, source)

    on_main_process(args, keep)
    return str(folder)


def save_whole(model: Any, tokenizer: Any, folder: Path, source: str) -> None:
    """Saves a plain checkpoint atomically: the folder is complete or absent. Records the model's source."""
    part = folder.with_name(f"_saving-{folder.name}")
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    (part / NOTE).write_text(f"{source}\n{what_model(source)}", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)


def made_from(folder: Path) -> list[str]:
    """Returns the recorded name and identity of a saved model's source; `[]` if `save_whole` did not write it."""
    note = folder / NOTE
    return note.read_text(encoding="utf-8").splitlines() if note.is_file() else []
