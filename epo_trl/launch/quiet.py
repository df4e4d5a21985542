"""Silences warnings of other libraries that appear in every run and that users cannot act on."""

from __future__ import annotations

import logging
import warnings


def quiet() -> None:
    """Adds one filter per message; all other messages stay.

    TRL 1.16 calls methods that newer versions of transformers have renamed. DeepSpeed, where it is installed, warns of
    a machine without a GPU as soon as accelerate imports it, also in a run without DeepSpeed.
    """
    old = r"`(is_)?gradient_checkpointing\w*` is deprecated"
    warnings.filterwarnings("ignore", old, FutureWarning, r"transformers\.modeling_utils")
    logging.getLogger("DeepSpeed").addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Setting accelerator to CPU")
