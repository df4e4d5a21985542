"""Calls of `generate` on rows of tokens."""

import torch
from transformers import GenerationConfig

ENDS, PAD = list(range(1, 12)), 0


def padded(rows):
    width = max(map(len, rows))
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
    return ids, torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])


def respond(generate, rows, *, tokens=6, sample=True, seed=0):
    """Returns a response for each row, as lists that end with the end token if there is one."""
    ids, mask = padded(rows)
    sampling = {"do_sample": True, "top_k": 0} if sample else {"do_sample": False}
    config = GenerationConfig(max_new_tokens=tokens, pad_token_id=PAD, eos_token_id=ENDS, **sampling)
    torch.manual_seed(seed)
    output = generate(input_ids=ids, attention_mask=mask, generation_config=config)
    assert torch.equal(output[:, : ids.shape[1]], ids)
    responses = []
    for row in output[:, ids.shape[1] :].tolist():
        ends = [i for i, token in enumerate(row) if token in ENDS]
        responses.append(row[: ends[0] + 1] if ends else row)
    return responses
