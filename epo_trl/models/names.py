"""Whether a model's name can be read, before anything is loaded."""

from __future__ import annotations

from pathlib import Path

TINY = "tiny"
CONFIGS = ("config.json", "adapter_config.json")  # of a model, of an adapter
# By name: the class depends on the HTTP library of the installed huggingface_hub.
UNREACHABLE = ("ConnectError", "ConnectionError", "OfflineModeIsEnabled")
NO_NETWORK = ", the Hub cannot be reached, and its local cache does not have the model"


def is_tiny(name: str) -> bool:
    """Returns whether a name stands for a tiny model with random weights, whatever its size."""
    return name.partition(":")[0] == TINY


def check_model_name(name: str | None, field: str = "model_name_or_path", revision: str | None = None) -> None:
    """Raises `ValueError` if a name is neither an existing folder nor, as far as one request can tell, a Hub id.

    A path that does not exist may look like a Hub id. transformers then asks the Hub for each file of a model, and five
    times for each where there is no network. This asks once. A slow or failing Hub is left to transformers.

    Args:
        name: A folder, a Hub id, `"tiny"` or `"tiny:WIDTHxLAYERS"`.
        field: The option, for the message.
        revision: Revision on the Hub.
    """
    if name is None:
        raise ValueError(f"{field}: expected a Hub id, a local path or 'tiny', got nothing")
    if is_tiny(name) or Path(name).is_dir():
        return
    reason = _why_unreadable(name, revision)
    if reason is not None:
        raise ValueError(f"{field}: got {name!r}, which cannot be read: there is no such folder{reason}")


def _why_unreadable(name: str, revision: str | None) -> str | None:
    """Returns what follows "there is no such folder", or `None` if it may be a model of the Hub."""
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
    except GatedRepoError:  # a kind of the next one, and transformers says what to do about it
        return None
    except RepositoryNotFoundError:
        return ", and the Hub has no such model that you may read"
    except Exception as error:
        return NO_NETWORK if type(error).__name__ in UNREACHABLE else None
    return None
