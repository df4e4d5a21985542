"""A response cut into what each of its tokens spells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

UNFINISHED = "\ufffd"  # what a decoder gives for bytes that are no letter yet


def token_pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Returns the text of each token; together they are the text of all, control tokens included.

    A letter that several tokens spell stands at the last of them. What an unfinished one at the end looks like is up to
    the tokenizer.

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
    # Some decoders look at what stands before a token. A few tokens are enough for them to see.
    pieces, start, done = [], 0, 0
    for end in range(1, len(ids) + 1):
        before, now = decode([ids[start:done], ids[start:end]])
        finished = not now.endswith(UNFINISHED) or end == len(ids)
        pieces.append(now[len(before) :] if finished else "")
        if finished and len(now) > len(before):
            start, done = done, end
    return pieces
