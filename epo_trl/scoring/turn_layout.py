"""Cuts the rows of a batch, one per episode, into the sequences that the model sees.

In windowed context each turn is a separate sequence, in concatenated context the whole row is one. All lengths and
indices are computed on the CPU, where collected episodes are: reading a length from a device would force a
synchronization.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from epo_trl.devices import to_device


@dataclass(slots=True)
class TurnLayout:
    """The turn of each completion token, and which tokens were sampled. All tensors are on the CPU.

    Args:
        turn_ids: (B, T) integers, -1 on padding.
        response_mask: (B, T), 1 on sampled tokens. Its values on padding are ignored.
        prompt_tokens: (B,) integers, number of tokens of each row's first prompt.
        windowed: Whether each turn is a separate sequence. Otherwise the row is one sequence.
    """

    turn_ids: Tensor
    response_mask: Tensor
    prompt_tokens: Tensor
    windowed: bool

    def rows(self, rows: slice | Tensor) -> TurnLayout:
        """Returns the layout of some rows."""
        return TurnLayout(self.turn_ids[rows], self.response_mask[rows], self.prompt_tokens[rows], self.windowed)

    @property
    def sampled(self) -> Tensor:
        """(B, T) booleans, true on sampled tokens."""
        return self.response_mask.bool() & (self.turn_ids >= 0)


@dataclass(slots=True)
class TurnBatch:
    """N sequences cut out of B rows, with M sampled tokens in total. `lengths` and `numbers` stay on the CPU.

    Args:
        input_ids: (N, L) token ids, right-padded with 0.
        labels: (N, L), the token id on sampled tokens, -100 elsewhere.
        lengths: (N,) number of tokens of each sequence, on the CPU.
        numbers: (N, L) index of each sampled token among the M, -1 on other tokens, on the CPU.
        sequence: (M,) index of each sampled token's sequence.
        position: (M,) its position in that sequence, always >= 1.
        row: (M,) its row.
        column: (M,) its column among the T completion tokens of the row.
        shape: (B, T).
    """

    input_ids: Tensor
    labels: Tensor
    lengths: Tensor
    numbers: Tensor
    sequence: Tensor
    position: Tensor
    row: Tensor
    column: Tensor
    shape: tuple[int, int]

    def to_rows(self, values: Tensor, fill: float = 0) -> Tensor:
        """Returns (B, T) values from those of the M sampled tokens, `fill` elsewhere. Differentiable.

        Further dimensions stay.
        """
        rows = values.new_full((*self.shape, *values.shape[1:]), fill)
        return rows.index_put((self.row, self.column), values)


def cut_turns(input_ids: Tensor, layout: TurnLayout) -> TurnBatch:
    """Cuts a batch of rows into sequences, on the device of their ids.

    Padding is taken from the layout, not from TRL's completion mask. `mask_truncated_completions` also clears that
    mask, which must not change what other tokens attend to.

    Args:
        input_ids: (B, P + T) token ids, with left-padded prompts and right-padded completions.
        layout: Layout of the last T columns.
    """
    turns, sampled = layout.turn_ids, layout.sampled
    prompt_width = input_ids.shape[1] - turns.shape[1]
    prompt = torch.arange(prompt_width) >= prompt_width - layout.prompt_tokens.unsqueeze(1)
    real = torch.cat([prompt, turns >= 0], dim=1)

    segment = torch.zeros(real.shape, dtype=torch.long)
    if layout.windowed:
        segment[:, prompt_width:] = turns.clamp(min=0)
    per_row = segment.amax(1) + 1
    segment += (per_row.cumsum(0) - per_row).unsqueeze(1)

    flat = segment[real]  # turns are contiguous in a row, so this is sorted
    lengths = torch.bincount(flat, minlength=int(per_row.sum()))
    place = torch.arange(len(flat)) - (lengths.cumsum(0) - lengths)[flat]
    is_response = torch.cat([torch.zeros_like(prompt), sampled], dim=1)[real]
    sequence, position = flat[is_response], place[is_response]

    shape = (len(lengths), max(2, int(lengths.max())))
    source = torch.full(shape, -1)  # position of each token among the flattened ids
    source[flat, place] = real.flatten().nonzero().squeeze(1)
    numbers = torch.full(shape, -1)
    numbers[sequence, position] = torch.arange(len(sequence))

    device = input_ids.device
    ids = input_ids.take(to_device(source.clamp(min=0), device)).masked_fill(to_device(source < 0, device), 0)
    row, column = sampled.nonzero(as_tuple=True)
    return TurnBatch(
        input_ids=ids,
        labels=ids.masked_fill(to_device(numbers < 0, device), -100),
        lengths=lengths,
        numbers=numbers,
        sequence=to_device(sequence, device),
        position=to_device(position, device),
        row=to_device(row, device),
        column=to_device(column, device),
        shape=(turns.shape[0], turns.shape[1]),
    )
