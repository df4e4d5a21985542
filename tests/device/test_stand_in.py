"""The stand-in raises where CUDA would, and nowhere else; it counts what makes the host wait."""

import gpu
import pytest
import stand_in
import torch
from torch.nn.functional import cross_entropy, embedding, layer_norm

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


def test_what_cuda_takes_is_taken():
    assert (THERE + torch.tensor(1.0)).device == torch.device("cuda", 0)
    assert THERE[PLACE].shape == (1, 4) and THERE[:, torch.tensor([True, False, True, False])].shape == (3, 2)
    assert (THERE @ THERE.T).sum().item() == 36
    changed = THERE.clone()
    changed[changed > 0] = 0
    assert changed.sum().item() == 0
    assert torch.accelerator.current_accelerator().type == "cuda" and torch.accelerator.device_count() == 1


def test_random_states_come_back_and_are_not_the_cpus():
    torch.manual_seed(0)
    here, there = torch.rand(8), torch.rand(8, device="cuda")
    assert not torch.equal(here, there.cpu())
    state = torch.cuda.get_rng_state()
    after = torch.rand(8, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(after, torch.rand(8, device="cuda"))
    torch.manual_seed(0)
    assert torch.equal(there, torch.rand(8, device="cuda"))
    own = [torch.rand(8, device="cuda", generator=torch.Generator("cuda").manual_seed(1)) for _ in range(2)]
    assert torch.equal(*own)


def test_a_layer_trains_in_bf16_and_comes_back_from_a_file(tmp_path):
    layer = torch.nn.Linear(4, 4, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        output = layer(THERE)
        assert (output.dtype, layer_norm(output, (4,)).dtype) == (torch.bfloat16, torch.float32)
        output.sum().backward()
    before = layer.weight.detach().clone()
    torch.optim.AdamW(layer.parameters(), fused=True).step()
    assert layer.weight.grad.is_cuda and not torch.equal(layer.weight, before)
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    assert torch.equal(torch.load(tmp_path / "layer.pt")["weight"], layer.weight)
    assert torch.load(tmp_path / "layer.pt", map_location="cpu")["weight"].device.type == "cpu"


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


def test_another_torch_is_refused_with_a_fix(monkeypatch):
    monkeypatch.setattr(stand_in, "_LIBRARY", None)
    monkeypatch.setattr(torch, "__version__", "2.14.0+cpu")
    with pytest.raises(stand_in.Unavailable, match=r"torch: expected 2\.13 .*, got 2\.14\.0\+cpu; .*pip install"):
        stand_in.install()
