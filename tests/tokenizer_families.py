"""Tokenizers like those of real models, each with a chat template, made from a few sentences without a download."""

import json

from rollout_parts import QWEN
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from epo_trl.models import build_tokenizer

TEXTS = [
    "You are in the middle of a room. Looking around you, you see a drawer 3, a cabinet 12, and a side table 1.",
    "task: find it. see: here can: go, look\n\n<think> I see a drawer. </think> <action> go to drawer 3 </action>",
    "user assistant system model start end of turn im_end im_start INST |> <| </ [ ] < > eot_id header message channel",
] * 3
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def turns(user, assistant, start, opening=""):
    """Returns a chat template: what stands around a user's message, around an answer, and before the next answer."""
    (a, b), (c, d) = user, assistant
    return (
        f"{opening}{{% for m in messages %}}{{% if m['role'] == 'user' %}}{{{{ {a!r} + m['content'] + {b!r} }}}}"
        f"{{% else %}}{{{{ {c!r} + m['content'] + {d!r} }}}}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ {start!r} }}}}{{% endif %}}"
    )


def fast(backend, template, special, other=(), *, eos, **kwargs):
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([token if isinstance(token, AddedToken) else AddedToken(token) for token in other])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, pad_token=special[0], **kwargs)
    tokenizer.chat_template = template
    return tokenizer


def byte_bpe(**model):
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(TEXTS, trainer)
    if model:
        spec = json.loads(backend.to_str())
        spec["model"] |= model
        backend = Tokenizer.from_str(json.dumps(spec))
    return backend


def qwen():
    """Byte-level, ChatML; tags of the reasoning are added tokens that are not special."""
    tags = [AddedToken(tag, normalized=False) for tag in ("<think>", "</think>", "<tool_call>")]
    return fast(byte_bpe(), QWEN, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], tags, eos="<|im_end|>")


def llama3():
    """Byte-level, a piece that is in the vocabulary needs no merges, and a BOS that the template writes."""
    special = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    template = turns(
        (header.format("user"), "<|eot_id|>"),
        (header.format("assistant"), "<|eot_id|>"),
        header.format("assistant"),
        "{{ bos_token }}",
    )
    tokenizer = fast(byte_bpe(ignore_merges=True), template, special, eos="<|eot_id|>", bos_token=special[0])
    bos = [(special[0], tokenizer.bos_token_id)]
    template = processors.TemplateProcessing(single=f"{special[0]} $A", special_tokens=bos)
    tokenizer.backend_tokenizer.post_processor = template
    return tokenizer


def harmony():
    """Byte-level; one token ends a message, another one an answer."""
    special = ["<|endoftext|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>"]
    answer = "<|start|>assistant<|channel|>final<|message|>"
    template = turns(("<|start|>user<|message|>", "<|end|>"), (answer, "<|end|>"), "<|start|>assistant")
    return fast(byte_bpe(), template, special, eos="<|return|>")


def sentence_bpe(normalizer, pre_tokenizer, own=()):
    """Returns a BPE over sentences with blanks as U+2581 and bytes for what it does not know."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.normalizer = normalizer
    if pre_tokenizer:
        backend.pre_tokenizer = pre_tokenizer
    backend.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    )
    spec = json.loads(backend.to_str())
    for token in [*own, *(f"<0x{byte:02X}>" for byte in range(256))]:
        spec["model"]["vocab"].setdefault(token, len(spec["model"]["vocab"]))
    spec["model"] |= {"byte_fallback": True, "fuse_unk": True}
    backend = Tokenizer.from_str(json.dumps(spec))
    blanks = decoders.Replace("▁", " ")
    strip = [decoders.Strip(" ", 1, 0)] if isinstance(normalizer, normalizers.Sequence) else []
    backend.decoder = decoders.Sequence([blanks, decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend


def llama2():
    """A blank before every part; [INST] is an added token that is matched after normalization, or ordinary pieces."""
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    template = turns(("<s>[INST] ", " [/INST]"), (" ", " </s>"), "")
    other = [AddedToken("[/INST]", normalized=True), AddedToken("<extra>", normalized=False, rstrip=True)]
    return fast(sentence_bpe(normalizer, None), template, ["<unk>", "<s>", "</s>"], other, eos="</s>", bos_token="<s>")


def gemma():
    """Control tokens are in the vocabulary; line breaks are added tokens that are text."""
    marks = ["<start_of_turn>", "<end_of_turn>"]
    own = [*marks, "\n\n", "<b>"]
    split = pre_tokenizers.Split(" ", "merged_with_previous")
    backend = sentence_bpe(normalizers.Replace(" ", "▁"), split, own)
    start = "<start_of_turn>{}\n"
    template = turns(
        (start.format("user"), "<end_of_turn>\n"), (start.format("model"), "<end_of_turn>\n"), start.format("model"),
        "{{ bos_token }}",
    )  # fmt: skip
    other = [AddedToken(token, normalized=False) for token in ("\n\n", "\n", "<b>")]
    return fast(backend, template, ["<unk>", "<s>", "</s>", *marks], other, eos="<end_of_turn>", bos_token="<s>")


def glm():
    """Byte-level; the header of the next message ends an answer."""
    template = turns(("<|user|>\n", ""), ("<|assistant|>\n", ""), "<|assistant|>\n", "[gMASK]<sop>")
    special = ["<|endoftext|>", "[gMASK]", "<sop>", "<|user|>", "<|assistant|>"]
    return fast(byte_bpe(), template, special, eos="<|endoftext|>")


def unigram():
    """Control tokens are pieces of the best score, and only the first part of a text begins with a blank."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    special = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    letters = sorted({letter for text in TEXTS for letter in text} - {" "} | set("▁|_{}"))
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=special, unk_token="<unk>", initial_alphabet=letters, show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    return fast(backend, QWEN, special, eos="<|im_end|>")


def tiny():
    """Ours."""
    return build_tokenizer(TEXTS)


FAMILIES = {build.__name__: build for build in (qwen, llama3, harmony, llama2, gemma, glm, unigram, tiny)}
LOSSLESS = ("qwen", "llama3", "harmony", "gemma", "glm")  # decoding gives back every text
