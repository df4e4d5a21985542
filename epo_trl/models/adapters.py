"""Adapters (LoRA): found, put on their base, trained on, merged into it.

An adapter is nothing without its base. One whose base is no checkpoint by itself, because it was made in memory, has it
beside, in a folder `base`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM
from transformers.integrations import deepspeed
from transformers.utils.peft_utils import find_adapter_config_file

from epo_trl.long_runs.checkpoint_files import what_model

BASE = "base"
NOTE = "made_from.txt"


@dataclass(frozen=True)
class Adapter:
    """An adapter on the disk or the Hub.

    Args:
        name: Its folder or Hub id.
        base: Folder or Hub id of the model that it belongs to.
        settings: Its `adapter_config.json`.
        revision: Revision of the adapter on the Hub; the base model has its own.
    """

    name: str
    base: str
    settings: dict[str, Any]
    revision: str | None = None

    @classmethod
    def find(cls, name: str, revision: str | None = None) -> Adapter | None:
        """Returns the adapter of that name, or `None` if it is something else.

        Raises:
            ValueError: If its base is nowhere, or its settings cannot be read.
        """
        path = find_adapter_config_file(name, revision=revision)
        if path is None:
            return None
        try:
            settings = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"model_name_or_path: got the adapter {name}, whose {path} is no JSON: {error}") from error
        return cls(name, _base_of(name, settings.get("base_model_name_or_path")), settings, revision)

    @property
    def base_revision(self) -> str:
        """Which version of the base the adapter was trained on, as PEFT has noted it."""
        return self.settings.get("revision") or "main"

    def on(self, model: Any, **kwargs: Any) -> Any:
        """Returns the model with the adapter on it, as PEFT's model.

        Raises:
            ValueError: If its weights cannot be read, or are for another model.
        """
        from peft import PeftModel

        with self.named(f"which cannot be put on {self.base}"):
            both = PeftModel.from_pretrained(model, self.name, revision=self.revision, **kwargs)
        both.peft_config["default"].base_model_name_or_path = self.base  # where it was found, for who saves it again
        return both

    def merged(self, **kwargs: Any) -> Any:
        """Returns the base with the adapter's changes in its own weights.

        Args:
            **kwargs: For loading the base, as for `from_pretrained`.

        Raises:
            ValueError: If the base or the adapter cannot be read.
        """
        with self.named():
            model = AutoModelForCausalLM.from_pretrained(self.base, revision=self.base_revision, **kwargs)
        return self.on(model).merge_and_unload(safe_merge=True)

    @contextmanager
    def named(self, what: str = "") -> Iterator[None]:
        """Says which adapter it is that something is wrong with; with its base, if `what` says nothing else."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            reason = " ".join(str(error).split())
            what = what or f"whose base {self.base} cannot be read"
            raise ValueError(f"model_name_or_path: got the adapter {self.name}, {what}: {reason}") from error


def _base_of(name: str, recorded: str | None) -> str:
    """Returns where an adapter's base is: beside it, if it was kept there, else where it was when it was saved."""
    folder = Path(name)
    if recorded is None or Path(recorded).name == BASE:
        for beside in (folder / BASE, folder.parent / BASE):  # the second for a checkpoint of a run
            if (beside / "config.json").is_file():
                return str(beside)
    if recorded is None:
        raise ValueError(f"model_name_or_path: got the adapter {name}, which names no base model")
    is_hub_id = recorded.count("/") <= 1 and not recorded.startswith(".")
    if not is_hub_id and not Path(recorded).is_dir():
        raise ValueError(
            f"model_name_or_path: got the adapter {name}, whose base {recorded} is not there; put it back, or put its "
            f"files in {folder / BASE}"
        )
    return recorded


def keep_base(make: Callable[[], Any], tokenizer: Any, run_dir: str, source: str) -> str:
    """Returns the folder `base` of a run after a model was made and saved there, by the main process.

    A run that goes on from a checkpoint keeps the base that it has begun with.

    Args:
        make: Returns the model.
        tokenizer: Saved with it.
        run_dir: The run's output folder.
        source: Source of the model.

    Raises:
        ValueError: If the run has begun with a base from another source.
    """
    folder, state = Path(run_dir) / BASE, PartialState()
    with state.main_process_first():
        before = made_from(folder) if any(Path(run_dir).glob("checkpoint-*")) else []
        begun = bool(before)
        if begun and before[-1] not in (source, what_model(source)):  # an earlier version noted the name alone
            raise ValueError(
                f"model_name_or_path: got {source}, but {run_dir} was begun with {before[0]}; take another output_dir"
            )
        if state.is_main_process and not begun:
            save_whole(make(), tokenizer, folder, source)
    return str(folder)


def save_whole(model: Any, tokenizer: Any, folder: Path, source: str) -> None:
    """Saves a plain checkpoint to a folder that is there with all its files, or not at all; notes its source."""
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    (part / NOTE).write_text(f"{source}\n{what_model(source)}", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)


def made_from(folder: Path) -> list[str]:
    """Returns what a model in a folder was made from: its name, and what that was; `[]` if it was not made by us."""
    note = folder / NOTE
    return note.read_text(encoding="utf-8").splitlines() if note.is_file() else []


@contextmanager
def whole_weights() -> Iterator[None]:
    """Loads models in one piece although DeepSpeed would split them as they are loaded: one process alone merges."""
    reference = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = reference
