"""Keys and values in blocks are those that transformers' cache has, and are seldom copied."""

import pytest
import torch
from trainer_kit import make_model
from transformers import DynamicCache

from epo_trl.models.prefix_cache import CACHE, GrowingLayer, growing_cache


def states(rows, tokens, seed):
    return torch.randn(2, rows, 3, tokens, 4, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "between",
    [
        lambda layer: None,
        lambda layer: layer.batch_select_indices(torch.tensor([2, 0, 3])),
        lambda layer: layer.batch_select_indices(torch.tensor([3, 2, 1, 0])),  # as many rows, in another order
        lambda layer: layer.batch_repeat_interleave(2),
        lambda layer: layer.reorder_cache(torch.tensor([1, 1, 0, 2])),
        lambda layer: layer.crop(-5),
        lambda layer: layer.reset(),
    ],
    ids=["nothing", "fewer rows", "other order", "repeated", "beams", "crop", "reset"],
)
def test_what_is_kept_is_what_the_plain_layer_keeps(between):
    ours, plain = GrowingLayer(), DynamicCache().layer_class_to_replicate()
    for layer in (ours, plain):
        layer.update(*states(4, 9, 0))
        layer.update(*states(4, 1, 1))
        between(layer)
    rows = plain.keys.shape[0] if plain.keys is not None else 4
    for step, tokens in enumerate([1, 200, 1, 3]):
        for got, expected in zip(
            ours.update(*states(rows, tokens, step)), plain.update(*states(rows, tokens, step)), strict=True
        ):
            assert torch.equal(got, expected)
    assert ours.get_seq_length() == plain.get_seq_length()


def test_a_token_is_added_without_a_copy_of_the_others():
    layer = GrowingLayer()
    blocks = set()
    for step in range(1000):
        layer.update(*states(1, 1, step))
        blocks.add(layer.keys.data_ptr())
    assert layer.get_seq_length() == 1000 and len(blocks) < 15


@pytest.mark.parametrize("family", ["seed_oss", "llama", "qwen3"])
def test_logits_are_those_of_the_plain_cache(family):
    model = make_model(family).eval()
    ids = torch.randint(12, 60, (3, 40), generator=torch.Generator().manual_seed(0))
    caches = growing_cache(), DynamicCache()
    with torch.inference_mode():
        for first, last in [(0, 30), (30, 31), (31, 40)]:
            logits = [model(input_ids=ids[:, first:last], **{CACHE: cache}).logits for cache in caches]
            assert torch.equal(*logits)
