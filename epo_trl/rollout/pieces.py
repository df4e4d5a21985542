"""Splits a response into the text of each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

UNFINISHED = "\ufffd"  # a decoder's output for an incomplete character


def token_pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Returns the text of each token; joined, they are the decoded text including control tokens.

    A character that spans several tokens belongs to the last of them. The tokenizer decides how an incomplete character
    at the end is shown.

    Args:
        tokenizer: Tokenizer of the ids.
        ids: Token ids.
    """

    def decode(lists: list[Sequence[int]]) -> list[str]:
        return tokenizer.batch_decode(lists, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    if not ids:
        return []
    [whole] = decode([ids])
    pieces = decode([[token] for token in ids])
    if "".join(pieces) == whole:
        return pieces
    # Some decoders depend on the preceding tokens. A few tokens of context suffice.
    pieces, start, done = [], 0, 0
    for end in range(1, len(ids) + 1):
        before, now = decode([ids[start:done], ids[start:end]])
        finished = not now.endswith(UNFINISHED) or end == len(ids)
        pieces.append(now[len(before) :] if finished else "")
        if finished and len(now) > len(before):
            start, done = done, end
    return pieces
