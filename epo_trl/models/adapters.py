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
from safetensors import SafetensorError
from transformers.integrations import deepspeed
from transformers.utils.peft_utils import find_adapter_config_file

from epo_trl.errors import InputError
from epo_trl.models.families import load_model
from epo_trl.runs.checkpoint_files import FINISHED, what_model
from epo_trl.runs.run_lock import on_main_process

BASE = "base"
NOTE = "made_from.txt"
_CHECKPOINT = re.compile(r"(last-)?checkpoint(-\d+)?")


@dataclass(frozen=True)
class Adapter:
    """An adapter on the disk or the Hub.

    Args:
        name: Folder or Hub id of the adapter.
        base: Folder or Hub id of its base model.
        settings: Contents of its `adapter_config.json`.
        revision: Revision of the adapter on the Hub; the base model has a separate one.
    """

    name: str
    base: str
    settings: dict[str, Any]
    revision: str | None = None

    @classmethod
    def find(cls, name: str, revision: str | None = None) -> Adapter | None:
        """Returns the adapter with that name, or `None` if the name is not an adapter's.

        Raises:
            ValueError: If its base does not exist, or its settings cannot be read.
        """
        path = find_adapter_config_file(name, revision=revision)
        if path is None:
            return None
        try:
            settings = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise InputError(f"model_name_or_path: got the adapter {name}, whose {path} is no JSON: {error}") from error
        return cls(name, _find_base(name, settings.get("base_model_name_or_path")), settings, revision)

    @property
    def base_revision(self) -> str:
        """Revision of the base that the adapter was trained on, as recorded by PEFT."""
        return self.settings.get("revision") or "main"

    def on(self, model: Any, **kwargs: Any) -> Any:
        """Loads the adapter onto the model and returns the PEFT model.

        Raises:
            ValueError: If the adapter's weights cannot be read, or belong to another model.
        """
        from peft import PeftModel

        with self._named(f"which cannot be put on {self.base}"):
            both = PeftModel.from_pretrained(model, self.name, revision=self.revision, **kwargs)
            result = both.load_adapter(self.name, "default", revision=self.revision, **kwargs)  # PEFT only warns
        self._check_names(result.missing_keys, result.unexpected_keys, type(model).__name__)
        both.peft_config["default"].base_model_name_or_path = self.base  # where it was found, so that saving records it
        both.adapter_source = self.name if Path(self.name).is_dir() else f"{self.name}@{self.revision or 'main'}"
        return both

    def _check_names(self, missing: list[str], unexpected: list[str], kind: str) -> None:
        """Raises `InputError` if weights of the adapter have no place in the model, or the other way round."""
        wrong = {"missing in the adapter": missing, "unknown to the model": unexpected}
        lists = [f"{len(names)} {what}, such as {', '.join(names[:2])}" for what, names in wrong.items() if names]
        if lists:
            raise InputError(
                f"model_name_or_path: got the adapter {self.name}, whose weights do not fit its base {self.base}, a "
                f"{kind}: {'; '.join(lists)}"
            )

    def load_base(self, load: Callable[..., Any] = load_model, **kwargs: Any) -> Any:
        """Loads the base, without the adapter.

        Args:
            load: Function that loads a model by name.
            **kwargs: Arguments of that function.

        Raises:
            ValueError: If the base cannot be read.
        """
        with self._named(f"whose base {self.base} cannot be read"):
            return load(self.base, revision=self.base_revision, **kwargs)

    def merged(self, **kwargs: Any) -> Any:
        """Loads the base and merges the adapter into its weights; see `load_base` and `on`.

        A head that shares its weights with the embedding gets its own if the adapter changes one of the two.

        Raises:
            InputError: If the adapter's weights are not finite.
        """
        model = self.on(self.load_base(**kwargs))
        if is_adapted(model.get_input_embeddings()) or is_adapted(model.get_output_embeddings()):
            _untie(model)
        with self._named(f"which cannot be merged into {self.base}"):
            return model.merge_and_unload(safe_merge=True)

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """Adds the adapter's name and the cause to errors."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            reason = " ".join(str(error).split())
            raise InputError(f"model_name_or_path: got the adapter {self.name}, {what}: {reason}") from error


def is_adapted(layer: Any) -> bool:
    """Returns whether an adapter adds to the output of a layer, and would change its weights when merged."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return isinstance(layer, BaseTunerLayer)


@contextmanager
def keeping_base(model: Any) -> Iterator[None]:
    """Restores the base to the bit where the block merges an adapter into it and unmerges it again.

    PEFT subtracts what it has added. In bf16 both are rounded, so the base would change with every merge. While the
    adapter is merged, the copies take as much memory as the adapted weights.
    """
    if not hasattr(model, "peft_config"):
        yield
        return
    merge, unmerge = model.merge_adapter, model.unmerge_adapter
    kept: list[tuple[Any, str, Any, torch.Tensor | None]] = []

    def keep_and_merge(*args: Any, **kwargs: Any) -> None:  # under ZeRO-3, the caller has gathered the weights
        for layer in filter(is_adapted, model.modules()):
            base = layer.get_base_layer()
            kept.extend(
                (base, name, weight, weight.data.clone() if weight.is_floating_point() else None)
                for name, weight in base.named_parameters(recurse=False)
            )
        merge(*args, **kwargs)

    def unmerge_and_restore() -> None:
        unmerge()
        for base, name, weight, value in kept:
            setattr(base, name, weight)  # a quantized weight is replaced, others change in place
            if value is not None:
                weight.data.copy_(value)
        kept.clear()

    model.merge_adapter, model.unmerge_adapter = keep_and_merge, unmerge_and_restore
    try:
        yield
    finally:
        del model.merge_adapter, model.unmerge_adapter


def _untie(model: Any) -> None:
    """Gives the head its own copy of the weights that it shares with the embedding."""
    if getattr(model.config, "tie_word_embeddings", False):
        head = model.get_output_embeddings()
        head = head.get_base_layer() if is_adapted(head) else head
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)
        model.config.tie_word_embeddings = model.config.get_text_config().tie_word_embeddings = False


def _find_base(name: str, recorded: str | None) -> str:
    """Finds an adapter's base: next to the adapter if it was saved there, else where the adapter recorded it.

    A relative path starts at a folder above the adapter, the nearest first, or else at the current folder, which may
    belong to another project.
    """
    folder = Path(name)
    if recorded is None or Path(recorded).name == BASE:
        # Where the folder is a link or ".", only the resolved path says which run it is of.
        beside_run = [at.parent / BASE for at in (folder, folder.resolve()) if _CHECKPOINT.fullmatch(at.name)]
        for beside in (folder / BASE, *beside_run):
            if (beside / "config.json").is_file():
                return str(beside)
    if recorded is None:
        raise InputError(f"model_name_or_path: got the adapter {name}, which names no base model")
    for above in folder.resolve().parents:  # one of them may be where a relative path was recorded
        if (above / recorded / "config.json").is_file():
            return recorded if above == Path.cwd() else str(above / recorded)
    if Path(recorded).is_dir():
        return recorded
    if recorded.count("/") > 1 or recorded.startswith("."):  # no Hub id
        raise InputError(
            f"model_name_or_path: got the adapter {name}, whose base {recorded} is not there; put it back, or put its "
            f"files in {folder / BASE}"
        )
    return recorded


def keep_base(args: Any, make: Callable[[], Any], tokenizer: Any, source: str, source_base: str | None = None) -> str:
    """Builds a model and saves it in the run's folder `base`, in the main process; returns that folder. Collective.

    A run that has a checkpoint or is finished keeps its original base.

    Args:
        args: Training arguments of the run.
        make: Function that builds the model.
        tokenizer: Tokenizer to save with the model.
        source: Source of the model.
        source_base: Base of the source if that is an adapter.

    Raises:
        InputError: On every rank, if the run was started with a base from another source, or the folder is not its own.
    """
    folder = Path(args.output_dir) / BASE

    def keep() -> None:
        before = made_from(folder) if _has_model(args.output_dir) else []
        if before and before[-1] != what_model(source):
            raise InputError(
                f"model_name_or_path: got {source}, but {args.output_dir} was begun with {before[0]}; use another "
                "output_dir"
            )
        if not before:
            _check_may_replace(folder, source_base)
            save_whole(make(), tokenizer, folder, source)

    on_main_process(args, keep)
    return str(folder)


def _check_may_replace(folder: Path, source_base: str | None) -> None:
    """Raises `InputError` for a folder `base` that no attempt of the run has left there."""
    is_of_run = bool(made_from(folder)) and (source_base is None or folder.resolve() != Path(source_base).resolve())
    if folder.exists() and not is_of_run and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(
            f"output_dir: expected no folder {BASE} of yours in it, got {folder}; the run saves its base model there. "
            "Use another output_dir"
        )


def drop_base(args: Any, start: str) -> None:
    """Deletes a base that an attempt without a checkpoint has left in the run's folder. Collective.

    `_find_base` would prefer it to the base of the run's adapter.

    Args:
        args: Training arguments of the run.
        start: Model or base that the run starts from, which stays.
    """
    folder = Path(args.output_dir) / BASE

    def drop() -> None:
        if not _has_model(args.output_dir) and folder.resolve() != Path(start).resolve() and made_from(folder):
            shutil.rmtree(folder)

    on_main_process(args, drop)


def _has_model(run_dir: str) -> bool:
    """Returns whether a run has a checkpoint or is finished."""
    return (Path(run_dir) / FINISHED).exists() or any(Path(run_dir).glob("checkpoint-*"))


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


@contextmanager
def whole_weights() -> Iterator[None]:
    """Disables DeepSpeed's sharding while loading, because a single process merges the whole weights."""
    reference = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = reference
