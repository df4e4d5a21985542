"""Names of models: those of tiny models, and whether a name can be resolved, before anything is loaded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from epo_trl.errors import InputError
from epo_trl.runs.checkpoint_files import last_checkpoint

DEFAULT_SIZE = (128, 2)  # width, layers
HEADS = 4
COPIES = ":copy"  # the end of the name of a model that starts to copy
CONFIGS = ("config.json", "adapter_config.json")  # of a model, of an adapter
TOKENIZER = "tokenizer_config.json"
# Compared by name: the class depends on the HTTP library of the installed huggingface_hub.
UNREACHABLE = ("ConnectError", "ConnectionError", "OfflineModeIsEnabled")
NO_NETWORK = ", the Hub cannot be reached, and its local cache does not have the model"


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


def check_model_name(
    name: str | None, field: str = "model_name_or_path", revision: str | None = None, output_dir: str | None = None
) -> None:
    """Raises `InputError` if a name is neither the folder of a model nor, as far as one request can tell, a Hub id.

    The name of a tiny model may not also be that of a folder with a model, other than the run's own. A path that does
    not exist may look like a Hub id. transformers then requests each file of a model from the Hub, five times each
    without a network. This function sends one request. A slow or failing Hub is left to transformers.

    Args:
        name: Folder, Hub id, `"tiny"` or `"tiny:WIDTHxLAYERS"`.
        field: Name of the option, for the message.
        revision: Revision on the Hub.
        output_dir: Output folder of the run.
    """
    if not name:
        raise InputError(f"{field}: expected a Hub id, a local path or 'tiny', got nothing")
    if tiny_size(name):
        is_own = output_dir is not None and Path(output_dir).resolve() == Path(name).resolve()
        if _has_one_of(name, CONFIGS) and not is_own:
            raise InputError(
                f"{field}: got {name!r}, random weights, but there is a model in a folder of that name; write ./{name} "
                "for the folder, or rename it"
            )
        return
    if Path(name).is_dir():
        if _has_one_of(name, (*CONFIGS, TOKENIZER)):
            return
        saved = last_checkpoint(name)
        hint = f"; its last checkpoint is {saved}" if saved else ""
        raise InputError(f"{field}: got {name!r}, which cannot be read: it has no {' or '.join(CONFIGS)}{hint}")
    reason = _why_unreadable(name, revision)
    if reason is not None:
        raise InputError(f"{field}: got {name!r}, which cannot be read: there is no such folder{reason}")


def _has_one_of(folder: str, files: Sequence[str]) -> bool:
    return any((Path(folder) / file).is_file() for file in files)


def _why_unreadable(name: str, revision: str | None) -> str | None:
    """Returns the end of the message after "there is no such folder"; `None` if the Hub may have the model."""
    if name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1:
        return ""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        if any(try_to_load_from_cache(name, file, revision=revision) is not None for file in CONFIGS):
            return None
        get_hf_file_metadata(hf_hub_url(name, CONFIGS[0], revision=revision))
    except HFValidationError:
        return ", and a Hub id is OWNER/NAME"
    except GatedRepoError:  # subclass of the next; transformers' own message explains the fix
        return None
    except RepositoryNotFoundError:
        return ", and the Hub has no such model that you may read"
    except Exception as error:
        return NO_NETWORK if type(error).__name__ in UNREACHABLE else None
    return None
