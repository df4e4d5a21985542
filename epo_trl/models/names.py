"""Names of models: those of tiny models, and whether a name can be resolved, before anything is loaded."""

from __future__ import annotations

import re
from pathlib import Path

from epo_trl.errors import InputError
from epo_trl.runs.checkpoint_files import last_checkpoint

DEFAULT_SIZE = (128, 2)  # width, layers
HEADS = 4
COPIES = ":copy"  # the end of the name of a model that starts to copy
CONFIGS = ("config.json", "adapter_config.json")  # of a model, of an adapter
TOKENIZER = "tokenizer_config.json"


def tiny_size(name: str | None) -> tuple[int, int] | None:
    """Parses width and layers from `"tiny"` or, for example, `"tiny:192x3"`; `None` for any other model name.

    A name may end with `":copy"`, see the argument `copies` of `build_model`.

    Raises:
        ValueError: If the size is invalid.
    """
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
    """Raises `InputError` if a name is a path but not the folder of a model; a Hub id is left to transformers.

    Args:
        name: Folder, Hub id, `"tiny"` or `"tiny:WIDTHxLAYERS"`.
        field: Name of the option, for the message.
    """
    if not name:
        raise InputError(f"{field}: expected a Hub id, a local path or 'tiny', got nothing")
    if tiny_size(name):
        return
    if Path(name).is_dir():
        if not any((Path(name) / file).is_file() for file in (*CONFIGS, TOKENIZER)):
            saved = last_checkpoint(name)
            hint = f"; its last checkpoint is {saved}" if saved else ""
            raise InputError(f"{field}: got {name!r}, which cannot be read: it has no {' or '.join(CONFIGS)}{hint}")
    elif name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1:
        raise InputError(f"{field}: got {name!r}, which cannot be read: there is no such folder")
