"""Random states on any kind of device. The devices are made up: what is checked is whom we ask for what."""

import sys

import psutil
import pytest
import torch
from trainer_kit import make_model, make_trainer, toy_tokenizer

from epo_trl.devices import return_freed_memory, seeded
from epo_trl.models import build_model
from epo_trl.models.generate import SamplingPolicy


class MadeUp:
    """A device's module: one generator for each index."""

    def __init__(self):
        self.states = [torch.tensor([7]), torch.tensor([8])]
        self.seen = []  # what draws in the block would have come from

    def get_rng_state(self, device):
        return self.states[torch.device(device).index].clone()

    def set_rng_state(self, state, device):
        self.states[torch.device(device).index] = state

    def manual_seed(self, seed):
        self.states[1] = torch.tensor([seed])  # of the current device
        self.seen.append(seed)


@pytest.mark.parametrize("kind", ["cuda", "xpu", "npu", "mps"])
def test_a_block_with_a_seed_seeds_its_device_and_restores_it(monkeypatch, kind):
    module = MadeUp()
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: module)
    device = torch.device("privateuseone" if kind == "npu" else kind, 1)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with pytest.raises(KeyError), seeded(5, device):
        assert module.states[1] == 5 and module.states[0] == 7, "no other device is seeded"
        one = torch.rand(3)
        raise KeyError
    assert module.states == [torch.tensor([7]), torch.tensor([8])] and module.seen == [5]
    assert torch.equal(torch.get_rng_state(), before)
    with seeded(5):
        assert torch.equal(torch.rand(3), one)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), one), "the numbers of torch.manual_seed"


@pytest.fixture
def seeded_devices(monkeypatch):
    """Returns a list of the seeds that a GPU of any kind is given."""
    seeds = []
    for module in (torch.cuda, torch.xpu, torch.mps):
        for name in ("manual_seed", "manual_seed_all"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, seeds.append)
    torch.manual_seed(0)
    assert len(seeds) >= 2, "torch.manual_seed seeds every device"
    seeds.clear()
    return seeds


@pytest.mark.parametrize("what", ["tiny model", "policy", "evaluation"])
def test_what_runs_on_the_cpu_seeds_no_gpu(tmp_path, seeded_devices, what):
    if what == "tiny model":
        build_model(toy_tokenizer(), seed=3)
    elif what == "policy":
        SamplingPolicy(make_model(), toy_tokenizer(), max_new_tokens=1)([[20, 21]])
    else:
        trainer = make_trainer(tmp_path)
        seeded_devices.clear()
        with trainer.engine.sampling(0.5, 3):
            pass
    assert seeded_devices == []


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
def test_memory_between_blocks_in_use_returns_to_the_system():
    """Every second block of 100 kB is freed: the heap cannot shrink at its end."""
    process = psutil.Process()
    blocks = [torch.ones(25_000) for _ in range(4_000)]
    blocks[::2] = [torch.empty(0)] * 2_000
    before = process.memory_info().rss
    return_freed_memory(torch.device("cpu"))
    assert before - process.memory_info().rss > 100e6
