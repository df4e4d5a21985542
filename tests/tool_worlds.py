"""Tokenizers with chat templates of real families, and models whose responses are given."""

import torch
import trl.chat_template_utils as templates
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerFast


def chat_tokenizer(texts, chat_template=templates.qwen3_chat_template):
    """Returns a byte-level tokenizer with a chat template of a real family, which reads the texts in few tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = [AddedToken(name, special=True) for name in ("<pad>", "<|im_start|>", "<|im_end|>")]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        [*texts] * 4,
        trainers.BpeTrainer(vocab_size=900, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    backend.add_tokens([AddedToken(tag, normalized=False) for tag in ("<tool_call>", "</tool_call>")])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<|im_end|>", padding_side="left"
    )
    tokenizer.chat_template = chat_template
    return tokenizer


class _Script(LogitsProcessor):
    """Forces on row i of a call the i-th response, or the first ones again."""

    def __init__(self, responses):
        self.responses, self.start = responses, None

    def __call__(self, input_ids, scores):
        self.start = input_ids.shape[1] if self.start is None else self.start
        forced = torch.full_like(scores, float("-inf"))
        for row in range(len(scores)):
            response = self.responses[row % len(self.responses)]
            forced[row, response[min(input_ids.shape[1] - self.start, len(response) - 1)]] = 0.0
        return forced


def scripted_model(tokenizer, responses):
    """Returns a tiny model that says the responses, whatever it is asked."""
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None, max_position_embeddings=8192,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    ids = [[*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id] for text in responses]
    generate = model.generate
    model.generate = lambda *args, **kwargs: generate(
        *args, **kwargs, logits_processor=LogitsProcessorList([_Script(ids)])
    )
    return model
