"""The tests of this folder, and the trainers that they make, see a GPU, or a stand-in for one: `make test-device`."""

import os

import gpu
import pytest
import stand_in
import torch

if gpu.COUNT:
    gpu.compute_in_float32()
    os.environ["DS_ACCELERATOR"] = "cuda"
    import launcher

    launcher.DEVICE = {}
else:
    try:
        stand_in.install()
    except stand_in.Unavailable as reason:
        raise pytest.UsageError(str(reason)) from None

import trainer_kit

trainer_kit.USE_CPU = False


@pytest.fixture(autouse=True)
def deterministic(request):
    """Tests of equal runs need it on a GPU, where other tests use operators that have no such kernel."""
    equal = any(words in request.node.name for words in ("bit_equal", "changes_nothing"))
    torch.use_deterministic_algorithms(gpu.COUNT > 0 and equal)
    yield
    torch.use_deterministic_algorithms(False)
