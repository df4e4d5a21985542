"""Encodes prompts so that only a template's own text can become a control token.

Text from an environment or a policy is data. An observation that spells `<|im_end|>` is encoded character by character;
the same text in a chat template is the single token that ends a turn.

Control tokens are all special tokens of the tokenizer, and its other added tokens (such as `<think>` or `<tool_call>`).
Added tokens of letters, digits and white space only are text: an added word, or a run of blanks.

The encoder gives control tokens secret names, which only `write` inserts.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import Model


def control_tokens(tokenizer: Any) -> dict[str, int]:
    """Returns the control tokens and their ids."""
    return {
        token.content: index
        for index, token in tokenizer.added_tokens_decoder.items()
        if token.special or not all(letter.isalnum() or letter.isspace() for letter in token.content)
    }


def _secret_names(tokens: Sequence[str]) -> dict[str, str]:
    """Returns an unguessable name for each token, in lowercase letters, which every normalizer keeps."""
    start = "".join(secrets.choice(string.ascii_lowercase) for _ in range(28))
    digits = str.maketrans(string.digits, string.ascii_lowercase[:10])
    return {token: start + f"{index:06}".translate(digits) for index, token in enumerate(tokens)}


class FastEncoder:
    """Encodes with a copy of the tokenizer's backend whose control tokens have other names.

    A control token's own name is then neither split off as an added token nor part of the model's vocabulary. The rest
    is unchanged: the normalizer, the pre-tokenizer, and how a control token treats the white space around it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._control = control_tokens(tokenizer)
        self._names = _secret_names(list(self._control))
        own = tokenizer.backend_tokenizer
        reachable = not self._names.keys().isdisjoint(own.get_vocab(with_added_tokens=False))
        self._backend = Tokenizer(_renamed_model(own, self._names) if reachable else own.model)
        for part in ("normalizer", "pre_tokenizer"):
            if getattr(own, part) is not None:
                setattr(self._backend, part, getattr(own, part))
        added = own.get_added_tokens_decoder()
        names = [self._names.get(token.content, token.content) for token in added.values()]
        flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
        self._backend.add_tokens(
            [
                AddedToken(name, **{flag: getattr(token, flag) for flag in flags})
                for token, name in zip(added.values(), names, strict=True)
            ]
        )
        got = zip(map(self._backend.token_to_id, names), added, strict=True)
        self._ids = {index: wanted for index, wanted in got if index != wanted}

    def write(self, text: str) -> str:
        """Returns a template's own text, its control tokens by their secret names."""
        parsed = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        normalizer = self._tokenizer.backend_tokenizer.normalizer
        normalized = str if normalizer is None else normalizer.normalize_str
        tokens = {index: token for token, index in self._control.items()}
        written, end = [], 0
        for index, (start, stop) in zip(parsed["input_ids"], parsed["offset_mapping"], strict=True):
            shown = text[start:stop].strip()  # a token may include the white space around it
            if index in tokens and normalized(shown) == normalized(tokens[index].strip()):
                start = text.index(shown, start)
                written += [text[end:start], self._names[tokens[index]]]
                end = start + len(shown)
        return "".join([*written, text[end:]])

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of written texts, no special tokens added."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        if not self._ids:
            return [encoding.ids for encoding in encodings]
        return [[self._ids.get(index, index) for index in encoding.ids] for encoding in encodings]


def _renamed_model(backend: Tokenizer, names: Mapping[str, str]) -> Model:
    """Returns the backend's model with some tokens of its vocabulary renamed, and without the merges that form them."""
    model = json.loads(backend.to_str())["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(token, token): index for token, index in model["vocab"].items()}
    else:  # Unigram
        model["vocab"] = [[names.get(token, token), score] for token, score in model["vocab"]]
    if model.get("unk_token") is not None:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
        model["merges"] = [(a, b) for a, b in pairs if not {a, b, a + b} & names.keys()]
    return Tokenizer.from_str(json.dumps({"version": "1.0", "added_tokens": [], "model": model})).model
