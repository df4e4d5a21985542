"""The stand-in raises where CUDA would, and nowhere else; it counts what makes the host wait."""

import gpu
import pytest
import stand_in
import torch
from torch.nn.functional import cross_entropy, embedding

pytestmark = pytest.mark.skipif(gpu.COUNT > 0, reason="a GPU needs no stand-in")
HERE = torch.ones(3, 4)
MASK = HERE > 0
PLACE = torch.tensor([1])
THERE = HERE.to("cuda")
PLACES = torch.arange(3, device="cuda")

MISTAKES = {
    "add": lambda: THERE + HERE,
    "where": lambda: torch.where(THERE > 0, THERE, HERE),
    "masked_fill": lambda: THERE.masked_fill(MASK, 0),
    "cat": lambda: torch.cat([THERE, HERE]),
    "stack": lambda: torch.stack([THERE, HERE]),
    "numpy": lambda: THERE.numpy(),
    "gather": lambda: THERE[0].gather(0, PLACE),
    "embedding": lambda: embedding(PLACE, THERE),
    "index_add": lambda: THERE.index_add(0, PLACE, HERE[:1]),
    "index_add on the host": lambda: HERE.index_add(0, PLACES, THERE),
    "scatter_add": lambda: THERE.scatter_add(0, MASK.long(), THERE),
    "cross_entropy": lambda: cross_entropy(THERE, PLACE.repeat(3)),
    "a mask of the device": lambda: HERE[THERE > 0],
    "indices of the device": lambda: HERE[PLACES],
    "multinomial": lambda: torch.multinomial(THERE[0], 1, generator=torch.Generator()),
    "rand": lambda: torch.rand(3, device="cuda", generator=torch.Generator()),
    "random state": lambda: torch.cuda.set_rng_state(torch.get_rng_state()),
    "no such device": lambda: torch.ones(3, device="cuda:1"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_that_cuda_refuses_is_refused(name):
    with pytest.raises((RuntimeError, TypeError)):
        MISTAKES[name]()


@pytest.mark.parametrize(
    ("wait", "kinds"),
    [
        (lambda: THERE.sum().item(), ["item"]),
        (lambda: THERE.tolist(), ["D2H"]),
        (lambda: bool((THERE > 0).all()), ["item"]),
        (lambda: THERE[THERE > 0], ["nonzero"]),
        (lambda: torch.tensor([1.0], device="cuda"), ["H2D"]),
        (lambda: HERE.to("cuda", non_blocking=True), ["H2D"]),
        (lambda: HERE.pin_memory().to("cuda", non_blocking=True), []),
        (lambda: torch.cuda.synchronize(), ["synchronize"]),
        (lambda: PLACES.repeat_interleave(PLACES), ["repeat_interleave"]),
        (lambda: PLACES.repeat_interleave(PLACES, output_size=3), []),
        (lambda: torch.where(THERE > 0, THERE, 0.0).sum(1, keepdim=True) * THERE, []),
        (lambda: torch.zeros(3, device="cuda").index_add_(0, PLACES, THERE[:, 0]), []),
    ],
)
def test_what_makes_the_host_wait_is_counted_with_its_place(wait, kinds):
    with stand_in.synchronisations() as seen:
        wait()
    assert [one.kind for one in seen] == kinds
    assert all(any(file == __file__ for file, *_ in one.stack) for one in seen)
