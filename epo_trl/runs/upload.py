"""Uploads the final model of a run to the Hub."""

from __future__ import annotations

import os
import warnings
from functools import partial
from typing import Any

from huggingface_hub import get_token, is_offline_mode, upload_folder

from epo_trl.errors import EpoTrlError, InputError
from epo_trl.runs import guards
from epo_trl.runs.run_lock import on_main_process


class UploadError(EpoTrlError, OSError):
    """The final model is saved, but its upload failed."""


def check_upload(args: Any) -> None:
    """Raises `InputError` for a run that is to be uploaded without a network or a token, before anything is played.

    Collective: only the main process uploads, so only its network and token count.
    """
    if args.push_to_hub:
        on_main_process(args, partial(_check_upload, args))


def _check_upload(args: Any) -> None:
    later = "or train without push_to_hub and upload afterwards: the same command with it then uploads the final model"
    if is_offline_mode():
        raise InputError(f"push_to_hub: expected a run that may reach the Hub, got HF_HUB_OFFLINE; unset it, {later}")
    if not (args.hub_token or get_token()):
        raise InputError(
            f"push_to_hub: expected a token of the Hub with write permission, got none; set HF_TOKEN or hub_token, "
            f"run hf auth login, {later}"
        )


def may_be_hub_id(name: str) -> bool:
    """Returns whether a model's `name_or_path` is neither empty, as for a model in memory, nor a folder."""
    return bool(name) and not os.path.isdir(name)


def upload_model(args: Any, repo_id: str, base: str | None = None) -> None:
    """Uploads the output folder, without checkpoints and files of the run. Warns of an adapter whose base is no Hub id.

    Raises:
        UploadError: If the upload fails.
    """
    if base is not None and not may_be_hub_id(base):
        warnings.warn(
            f"push_to_hub: the adapter's base, {base or 'a model in memory'}, is not from the Hub, so others cannot "
            f"load the adapter; upload the merged model instead: epo-trl merge {args.output_dir} --out DIR",
            stacklevel=2,
        )
    try:
        upload_folder(
            repo_id=repo_id,
            folder_path=args.output_dir,
            commit_message="Final model",
            token=args.hub_token,
            revision=args.hub_revision,
            ignore_patterns=["_*", "checkpoint-*", f"{guards.FOLDER}/*"],  # the first two as in transformers
        )
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UploadError(
            f"push_to_hub: {args.output_dir} is finished, but its upload to {repo_id} failed: {type(error).__name__}: "
            f"{reason}. The same command uploads it again"
        ) from error
