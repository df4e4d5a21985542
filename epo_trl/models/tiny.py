"""A language model of some 400,000 parameters whose vocabulary is an environment's own text. No download.

What makes so small a model learn a text game is its vocabulary: an entity such as "drawer 3" is **one** token, whose
embedding starts as the sum of those of "drawer" and "3". The model can then copy an entity from the prompt with one
attention step, and knows from the start which drawers are alike.

Texts are lower-cased, white space of any kind only separates, and decoding joins tokens with single spaces: so
"go to drawer 3" comes back exactly, "in the drawer 3, a mug" as "in the drawer 3 , a mug".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from epo_trl.devices import seeded

PAD, UNK, TURN_START, TURN_END = "<pad>", "<unk>", "<|im_start|>", "<|im_end|>"
TAGS = ("<think>", "</think>", "<action>", "</action>")
DEFAULT_SIZE = (128, 2)  # width, layers
HEADS = 4
ROLES = ("system", "user", "assistant", "tool")

# The generation markers let TRL's SFTTrainer tell the assistant's tokens (`assistant_only_loss=True`).
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

# A word keeps the marks and digits inside it, so that "in/on", "don't", "half-full" and "wait1" come back exactly.
_WORD = r"\p{L}[\p{L}0-9]*(?:['/\-]\p{L}[\p{L}0-9]*)*"
_TAG = "|".join(re.escape(text) for text in (*TAGS, UNK))
_PLAIN = rf"{_TAG}|{_WORD}|[0-9]+|[^\p{{L}}0-9\s]"
_ENTITY = re.compile(r"(.*\S) ([0-9]+)", re.DOTALL)


def _splitter(pattern: str) -> pre_tokenizers.PreTokenizer:
    # `invert` swaps the roles: what matches is kept, what lies between (white space) is removed
    return pre_tokenizers.Split(Regex(pattern), "removed", invert=True)


def _largest_numbers(texts: Iterable[str], entities: Iterable[str] | None) -> dict[str, int]:
    """Returns `{entity class: largest number}`: every word that a number follows, or those named in `entities`."""
    largest: dict[str, int] = {}
    if entities is None:
        find = _splitter(rf"{_WORD} [0-9]{{1,2}}(?![0-9])|{_PLAIN}")
        pieces = {piece for text in texts for piece, _ in find.pre_tokenize_str(text)}
        names = [piece for piece in pieces if piece[0].isalpha() and _ENTITY.fullmatch(piece)]
    else:
        names = [entity.lower() for entity in entities]
    for name in names:
        match = _ENTITY.fullmatch(name)
        if match is None:
            raise ValueError(f"entities: got {name!r}, expected a name and its largest number, like 'drawer 12'")
        largest[match[1]] = max(largest.get(match[1], 0), int(match[2]))
    return largest


def _entity_pattern(largest: Mapping[str, int]) -> str:
    """Returns the alternatives that match an entity whose number is in the vocabulary, longest name first."""
    parts = []
    for name in sorted(largest, key=lambda name: (-len(name), name)):
        # The look-ahead makes "drawer 1" fail on "drawer 12", so the order of the numbers does not matter
        numbers = "|".join(str(number) for number in range(1, largest[name] + 1))
        parts.append(rf"{re.escape(name)} (?:{numbers})(?![0-9])")
    return "".join(part + "|" for part in parts)


def build_tokenizer(texts: Iterable[str], *, entities: Iterable[str] | None = None) -> PreTrainedTokenizerFast:
    """Returns a word-level tokenizer whose vocabulary is the words, numbers, marks and entities of `texts`.

    The vocabulary is closed over numbers: where "drawer 12" is known, so are "drawer 1" to "drawer 12" and the plain
    numbers 0 to 12. The parts of an entity are tokens too, so that an entity with a larger number falls apart into
    known words instead of becoming `<unk>`. Equal sets of words give equal ids, whatever the order of the texts.

    `<think>`, `</think>`, `<action>`, `</action>` and `<unk>` are ordinary tokens: decoding with
    `skip_special_tokens=True` drops only `<pad>`, `<|im_start|>` and `<|im_end|>` (the end-of-sequence token).

    Args:
        texts: Everything that a prompt or a response may say: templates, observations, actions, thoughts.
        entities: Entities with their largest numbers, as in `["drawer 12", "mug 3"]`; a name may have several words.
            Default: each word of `texts` that a number below 100 follows directly, which also takes in "step 3".
    """
    texts = [text.lower() for text in texts]
    largest = _largest_numbers(texts, entities)
    split = _splitter(_entity_pattern(largest) + _PLAIN)

    vocabulary: set[str] = set(ROLES)
    for name, top in largest.items():
        vocabulary.update(piece for piece, _ in _splitter(_PLAIN).pre_tokenize_str(name))
        vocabulary.update(f"{name} {number}" for number in range(1, top + 1))
    for text in texts:
        for piece, _ in split.pre_tokenize_str(text):
            vocabulary.add(piece)
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


@dataclass(frozen=True)
class _Family:
    config: str
    model: str
    extra: tuple[str, ...] = ()  # fields of the configuration that are set to the size of one head
    settings: Mapping[str, Any] = field(default_factory=dict)


# The layers of Qwen2, bit for bit, by another name: transformers 5.23 reads the tokenizer of every "qwen2" checkpoint
# as Qwen2's own byte-level BPE, whatever class the checkpoint names.
_QWEN2_LAYERS = {
    "attention_dropout": 0.0,
    "residual_dropout": 0.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
FAMILIES: dict[str, _Family] = {
    "seed_oss": _Family("SeedOssConfig", "SeedOssForCausalLM", ("head_dim",), _QWEN2_LAYERS),
    "llama": _Family("LlamaConfig", "LlamaForCausalLM", ("head_dim",)),
    "qwen3": _Family("Qwen3Config", "Qwen3ForCausalLM", ("head_dim",)),
    "gemma": _Family("GemmaConfig", "GemmaForCausalLM", ("head_dim",)),
    "gemma2": _Family("Gemma2Config", "Gemma2ForCausalLM", ("head_dim", "query_pre_attn_scalar")),
}


def tiny_size(name: str | None) -> tuple[int, int] | None:
    """Returns width and layers of `"tiny"` and of, for example, `"tiny:192x3"`; `None` for any other model's name.

    Raises:
        ValueError: If the size is not one that a model can have.
    """
    kind, colon, size = str(name).partition(":")
    if kind != "tiny":
        return None
    if not colon:
        return DEFAULT_SIZE
    match = re.fullmatch(r"([1-9][0-9]{0,3})x([1-9][0-9]?)", size)
    if match is None or int(match[1]) % (2 * HEADS):
        raise ValueError(
            f"model_name_or_path: got {name!r}; expected 'tiny', or a width, a multiple of {2 * HEADS}, and a number "
            "of layers, as in 'tiny:192x3'"
        )
    return int(match[1]), int(match[2])


def build_model(
    tokenizer: PreTrainedTokenizerFast,
    *,
    family: str = "seed_oss",
    hidden_size: int = DEFAULT_SIZE[0],
    layers: int = DEFAULT_SIZE[1],
    heads: int = HEADS,
    max_position_embeddings: int = 8192,
    seed: int = 0,
) -> PreTrainedModel:
    """Returns a small causal language model with random weights in float32 and tied embeddings, on the CPU.

    The embedding of an entity starts as `(sum of the embeddings of its parts) / sqrt(number of parts)`: the parts are
    independent, so its size is that of any other token.

    Args:
        tokenizer: From [`build_tokenizer`]. Its length is the vocabulary size; its eos and pad tokens are the model's.
        family: Architecture: "seed_oss", whose layers here are those of Qwen2, or, for tests across architectures,
            "llama", "qwen3", "gemma" and "gemma2" (caps its logits). Saved beside its tokenizer, each is a checkpoint
            that transformers' `AutoModelForCausalLM` and `AutoTokenizer` read.
        hidden_size: Width; a multiple of `2 * heads`. The MLP is twice as wide.
        layers: Number of transformer layers.
        heads: Number of attention heads.
        max_position_embeddings: Longest context, in tokens. Costs no parameters.
        seed: Same seed and tokenizer, same weights. The global random state is left as it was.
    """
    if family not in FAMILIES:
        raise ValueError(f"family: got {family!r}, expected one of {', '.join(FAMILIES)}")
    if hidden_size % (2 * heads):
        raise ValueError(f"hidden_size: got {hidden_size}, expected a multiple of 2 * heads = {2 * heads}")
    names = FAMILIES[family]
    extra: dict[str, Any] = {name: hidden_size // heads for name in names.extra}
    config = getattr(transformers, names.config)(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
        **names.settings,
        **extra,
    )
    with seeded(seed):
        model: PreTrainedModel = getattr(transformers, names.model)(config).float()
    _compose_entities(model, tokenizer.get_vocab())
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model.eval()


@torch.no_grad()
def _compose_entities(model: PreTrainedModel, vocabulary: Mapping[str, int]) -> None:
    """Sets the embedding of each token that has several words to the scaled sum of its words' embeddings."""
    weight = model.get_input_embeddings().weight
    for token, index in vocabulary.items():
        parts = [vocabulary[part] for part in token.split(" ") if part in vocabulary]
        if " " in token and parts:
            weight[index] = weight[parts].sum(0) / len(parts) ** 0.5
