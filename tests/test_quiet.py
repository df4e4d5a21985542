"""Which warnings of other libraries a run hides, and what `make smoke` ends with: what it did and what comes next."""

import logging
import runpy
import warnings
from pathlib import Path

import pytest
from event_files import write_events
from transformers import PreTrainedModel, modeling_utils

from epo_trl.cli.program import hide_warnings

ROOT = Path(__file__).parents[1]


@pytest.fixture
def restored():
    logger = logging.getLogger("DeepSpeed")
    filters = list(logger.filters)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield seen
    logger.filters[:] = filters


def test_a_renamed_method_is_silent_and_any_other_warning_is_not(restored):
    def warn(text, category=FutureWarning, module=modeling_utils.__name__):
        warnings.warn_explicit(text, category, "x.py", 1, module)

    hide_warnings()
    warn("`gradient_checkpointing_enable` is deprecated and will be removed in v6.")
    warn("`is_gradient_checkpointing` is deprecated and will be removed in v6.")
    assert restored == []
    warn("`gradient_checkpointing_enable` is deprecated", module="mine")
    warn("`gradient_checkpointing_enable` is deprecated", UserWarning)
    warn("`other` is deprecated")
    assert len(restored) == 3
    assert hasattr(PreTrainedModel, "gradient_checkpointing_disable")  # as TRL 1.16 calls it


def test_deepspeed_says_nothing_of_a_missing_gpu_and_all_else(restored, caplog):
    hide_warnings()
    logger = logging.getLogger("DeepSpeed")
    logger.addHandler(caplog.handler)
    try:
        logger.warning("Setting accelerator to CPU. If you have GPU or other accelerator, ...")
        logger.warning("overflow")
    finally:
        logger.removeHandler(caplog.handler)
    assert set(caplog.messages) == {"overflow"}


def test_make_smoke_ends_with_its_result_and_the_next_command(tmp_path):
    name = "train/env/success_rate"
    write_events(tmp_path / "run", [(name, 1, 0.25, 1.0), (name, 5, 0.5, 1.0), (name, 10, 0.75, 1.0)])
    result = runpy.run_path(str(ROOT / "recipes" / "smoke_result.py"))["result"](tmp_path / "run")
    assert "25% of its training episodes in RL step 1, 75% in RL step 10." in result and "next: make train" in result
    target = (ROOT / "Makefile").read_text().partition("\nsmoke:")[2].partition("\n\n")[0]
    assert target.splitlines()[-1] == "\t@$(PY) recipes/smoke_result.py runs/smoke-test/grpo_epo"
