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
    """Tests of bit-equal runs need it on a GPU, where other tests use operators that have no such kernel."""
    torch.use_deterministic_algorithms(gpu.COUNT > 0 and "bit_equal" in request.node.name)
    yield
    torch.use_deterministic_algorithms(False)
