"""How often a GPU would have to finish its work because the host asks for a value: as good as never."""

import random

import pytest
import torch
from device_reads import DeviceReads
from generation_kit import respond
from method_table import CASES, PPO, config_of, trainer_of
from torch.utils._pytree import tree_leaves
from trainer_kit import collected, make_model

from epo_trl.methods.epo import EPO
from epo_trl.models.prefix_cache import PrefixCache

# Of a micro-batch: entropies of the episodes that are kept, and a check of turn ids that is made on a CPU alone. The
# candidates of a nucleus, or the few positions whose nucleus is large, are looked for on the device, once in a pass.
ALLOWED, CHOSEN = 2, {"ref-nucleus": 1, "siren": 1}


@pytest.mark.parametrize(
    ("read", "number"),
    [
        (lambda x: x.sum().item(), 1),
        (lambda x: int(x.max()), 1),
        (lambda x: x.tolist(), 1),
        (lambda x: x.cpu().sum().item(), 1),
        (lambda x: x[x > 0].sum(), 1),
        (lambda x: bool((x > 0).any()), 1),
        (lambda x: (x > 0).nonzero(), 1),
        (lambda x: torch.equal(x, x), 1),
        (lambda x: x[torch.tensor([True, False, True])], 1),
        (lambda x: torch.where(x > 0, x, 0.0).sum() + x[torch.tensor([0, 1])].sum(), 0),
        (lambda x: torch.ones(3)[torch.ones(3) > 0].sum().item(), 0),
    ],
)
def test_the_counter_sees_reads_of_the_device_and_no_others(monkeypatch, read, number):
    monkeypatch.setattr("device_reads.OURS", __file__)
    values = torch.tensor([1.0, -1.0, 2.0])
    with DeviceReads([values]) as reads:
        read(values)
    assert reads.ours.total() == number, reads.ours


def micro_batch_reads(trainer):
    """Returns the reads of the loss of a collected batch of eight episodes."""
    for method in trainer.methods.values():
        if isinstance(method, EPO) and method.history.per == "step":
            method.history.append(3.0)
    inputs = {name: value.clone() for name, value in collected(trainer).items()}  # the rows' layout stays on the CPU
    kept = tree_leaves({**trainer.step.state_dict(), "layout": None})
    on_device = [*(value for name, value in inputs.items() if name not in ("row", "turn_ids")), *kept]
    with DeviceReads([*on_device, *trainer.model.parameters()]) as reads:
        trainer.compute_loss(trainer.model, inputs)
    return reads.ours


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_micro_batch_asks_the_device_for_nothing(tmp_path, name):
    ends = {"bootstrap_truncated": False} if name in PPO else {}
    trainer = trainer_of(tmp_path, name, config_of(name, CASES[name].settings, CASES[name].fields) | ends)
    reads = micro_batch_reads(trainer)
    assert reads.total() <= ALLOWED + CHOSEN.get(name, 0), reads


@pytest.mark.parametrize(
    "changes",
    [{"tokens_per_pass": 60}, {"tokens_per_pass": 60, "recompute_passes": True}, {"context": "concatenated"}],
    ids=str,
)
def test_no_more_of_it_in_other_passes(tmp_path, changes):
    reads = micro_batch_reads(trainer_of(tmp_path, "epo", {"epo_lambda": 0.5, **changes}))
    assert reads.total() <= ALLOWED, reads


@pytest.mark.parametrize("rows", [2, 8])
def test_generation_that_goes_on_asks_twice_a_call_however_many_rows(rows):
    """For the prompts before, for the responses after."""
    model, rng = make_model(), random.Random(0)
    cache = PrefixCache(model.eval())
    prompts = [[rng.randrange(12, 60) for _ in range(rng.randint(3, 9))] for _ in range(rows)]
    responses = respond(cache.generate, prompts)
    prompts = [[*prompt, *response, 30] for prompt, response in zip(prompts, responses, strict=True)]
    reads = DeviceReads(model.parameters())

    def generate(**kwargs):
        for value in kwargs.values():
            reads.add(value)
        with reads:
            return cache.generate(**kwargs)

    respond(generate, prompts)
    assert cache.reused and reads.ours.total() == 2, reads.ours
