"""A language model of some 400,000 parameters whose vocabulary is an environment's own text. No download.

The vocabulary lets so small a model learn a text game: an entity such as "drawer 3" is **one** token, whose embedding
starts as the sum of those of "drawer" and "3". The model can then copy an entity from the prompt with one attention
step, and similar entities have similar embeddings from the start.

Texts are lower-cased, white space of any kind only separates tokens, and decoding joins tokens with single spaces:
"go to drawer 3" is restored exactly, "in the drawer 3, a mug" becomes "in the drawer 3 , a mug".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from epo_trl.devices import seeded

DEFAULT_SIZE = (128, 2)  # width, layers
HEADS = 4
PAD, UNK, TURN_START, TURN_END = "<pad>", "<unk>", "<|im_start|>", "<|im_end|>"
TAGS = ("<think>", "</think>", "<action>", "</action>")
ROLES = ("system", "user", "assistant", "tool")

# The generation markers let TRL's SFTTrainer identify the assistant's tokens (`assistant_only_loss=True`).
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + ' ' -}}"
    "{%- if message['role'] == 'assistant' -%}"
    "{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}"
    "{%- else -%}"
    "{{- message['content'] + '<|im_end|>' -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant ' -}}{%- endif -%}"
)

# A word keeps the marks and digits inside it, so that "in/on", "don't", "half-full" and "wait1" are restored exactly.
_WORD = r"\p{L}[\p{L}0-9]*(?:['/\-]\p{L}[\p{L}0-9]*)*"
_TAG = "|".join(re.escape(text) for text in (*TAGS, UNK))
_PLAIN = rf"{_TAG}|{_WORD}|[0-9]+|[^\p{{L}}0-9\s]"
_ENTITY = re.compile(r"(.*\S) ([0-9]+)", re.DOTALL)


def _splitter(pattern: str) -> pre_tokenizers.PreTokenizer:
    # with `invert`, matches are kept and the white space between them is removed
    return pre_tokenizers.Split(Regex(pattern), "removed", invert=True)


def _largest_numbers(texts: Iterable[str]) -> dict[str, int]:
    """Returns `{entity class: largest number}` for every word directly before a number from 1 to 99."""
    find = _splitter(rf"{_WORD} [0-9]{{1,2}}(?![0-9])|{_PLAIN}")
    largest: dict[str, int] = {}
    for piece in {piece for text in texts for piece, _ in find.pre_tokenize_str(text)}:
        if piece[0].isalpha() and (match := _ENTITY.fullmatch(piece)) and int(match[2]):
            largest[match[1]] = max(largest.get(match[1], 0), int(match[2]))
    return largest


def _entity_pattern(largest: Mapping[str, int]) -> str:
    """Builds the regex alternatives for entities whose number is in the vocabulary, longest name first."""
    parts = []
    for name in sorted(largest, key=lambda name: (-len(name), name)):
        # The look-ahead makes "drawer 1" fail on "drawer 12", so the order of the numbers does not matter
        numbers = "|".join(str(number) for number in range(1, largest[name] + 1))
        parts.append(rf"{re.escape(name)} (?:{numbers})(?![0-9])")
    return "".join(part + "|" for part in parts)


def build_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Builds a word-level tokenizer from the words, numbers, marks and entities of `texts`.

    The vocabulary is closed over numbers: where "drawer 12" is known, so are "drawer 1" to "drawer 12" and the plain
    numbers 0 to 12. The parts of an entity are tokens too, so that an entity with a larger number splits into
    known words instead of becoming `<unk>`. Equal sets of words give equal ids, whatever the order of the texts.

    `<think>`, `</think>`, `<action>`, `</action>` and `<unk>` are ordinary tokens: decoding with
    `skip_special_tokens=True` drops only `<pad>`, `<|im_start|>` and `<|im_end|>` (the end-of-sequence token).
    """
    texts = [text.lower() for text in texts]
    largest = _largest_numbers(texts)
    split = _splitter(_entity_pattern(largest) + _PLAIN)

    vocabulary: set[str] = set(ROLES)
    for name, top in largest.items():
        vocabulary.update(piece for piece, _ in _splitter(_PLAIN).pre_tokenize_str(name))
        vocabulary.update(f"{name} {number}" for number in range(1, top + 1))
    vocabulary.update(piece for text in texts for piece, _ in split.pre_tokenize_str(text))
    numbers = [int(piece) for piece in vocabulary if piece.isascii() and piece.isdigit() and len(piece) < 4]
    vocabulary.update(str(number) for number in range(max([0, *numbers, *largest.values()]) + 1))

    first = (PAD, UNK, TURN_START, TURN_END, *TAGS)
    ids = {token: index for index, token in enumerate([*first, *sorted(vocabulary.difference(first))])}
    backend = Tokenizer(models.WordLevel(ids, unk_token=UNK))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = split
    backend.add_special_tokens([AddedToken(token, special=True) for token in (PAD, TURN_START, TURN_END)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=TURN_END,
        additional_special_tokens=[TURN_START],
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


# The layers of Qwen2, bit for bit, under another name: transformers 5.23 loads the tokenizer of every "qwen2"
# checkpoint as Qwen2's own byte-level BPE, whatever class the checkpoint names.
_QWEN2_LAYERS = {
    "attention_dropout": 0.0,
    "residual_dropout": 0.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def build_model(
    tokenizer: PreTrainedTokenizerFast,
    *,
    family: str = "seed_oss",
    hidden_size: int = DEFAULT_SIZE[0],
    layers: int = DEFAULT_SIZE[1],
    heads: int = HEADS,
    max_position_embeddings: int = 8192,
    seed: int = 0,
    copies: bool = False,
) -> PreTrainedModel:
    """Builds a small causal language model with random float32 weights and tied embeddings, on the CPU.

    The embedding of an entity starts as `(sum of the embeddings of its parts) / sqrt(number of parts)`: the parts are
    independent, so its norm matches that of other tokens.

    Args:
        tokenizer: Tokenizer from [`build_tokenizer`].
        family: Architecture: "seed_oss", with the layers of Qwen2, or another, for tests.
        hidden_size: Width, a multiple of `2 * heads`. The MLP is twice as wide.
        layers: Number of transformer layers.
        heads: Number of attention heads.
        max_position_embeddings: Maximum context in tokens. Adds no parameters.
        seed: Seed for the weights. The global random state is unchanged.
        copies: Whether attention passes on what it sees, so that the model only has to learn where to look. For texts
            with names, such as product ids, that a short warm start otherwise guesses by their frequency.
    """
    head_dim = hidden_size // heads
    own: dict[str, dict[str, Any]] = {"seed_oss": _QWEN2_LAYERS, "gemma2": {"query_pre_attn_scalar": head_dim}}
    config = AutoConfig.for_model(
        family,
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
        **own.get(family, {}),
    )
    with seeded(seed):
        model: Any = AutoModelForCausalLM.from_config(config).float()
    model.built_as = f"{family} {hidden_size}x{layers}, {heads} heads, vocabulary {len(tokenizer)}"
    if copies:
        model.built_as += ", copies"
        _start_copying(model)
    _compose_entities(model, tokenizer.get_vocab())
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model.eval()


@torch.no_grad()
def _start_copying(model: PreTrainedModel) -> None:
    """Sets the value matrices to the identity I and the output matrices to 0.2 I, and doubles the embeddings."""
    model.get_input_embeddings().weight.mul_(2)
    for layer in model.model.layers:
        torch.nn.init.eye_(layer.self_attn.v_proj.weight)
        torch.nn.init.eye_(layer.self_attn.o_proj.weight).mul_(0.2)


@torch.no_grad()
def _compose_entities(model: PreTrainedModel, vocabulary: Mapping[str, int]) -> None:
    """Sets the embedding of each multi-word token to the scaled sum of its words' embeddings."""
    weight = model.get_input_embeddings().weight
    for token, index in vocabulary.items():
        parts = [vocabulary[part] for part in token.split(" ") if part in vocabulary]
        if " " in token and parts:
            weight[index] = weight[parts].sum(0) / len(parts) ** 0.5
