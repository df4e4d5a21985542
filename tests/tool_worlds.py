"""Tokenizers with chat templates of real families, and models whose responses are given."""

import pytest
import torch
import trl.chat_template_utils as templates
from rollout_parts import answer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from trainer_kit import make_config
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from epo_trl.trainers import EPOTrainer


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


def check_training(folder, suite, actions, **changes):
    """Trains for two steps on groups that take each of these three actions, one of which wins."""
    said = [answer(action) for action in actions]
    tokenizer = chat_tokenizer(["You are an agent that acts in a world described in text", *said])
    model = scripted_model(tokenizer, said)
    config = make_config(
        folder, per_device_train_batch_size=3, num_generations=3, max_steps=2, max_turns=1, max_prompt_length=1024,
        max_completion_length=80, **changes,
    )  # fmt: skip
    trainer = EPOTrainer(model, suite, args=config, processing_class=tokenizer)
    before = [value.detach().clone() for value in model.parameters()]
    trainer.train()
    trainer.close_envs()
    logged = [line["env/success_rate"] for line in trainer.state.log_history if "reward" in line]
    assert logged == pytest.approx([1 / 3] * 2)
    assert any((value != old).any() for value, old in zip(model.parameters(), before, strict=True))


def train_with_trl(folder, model, tokenizer, calls, **parts):
    """Returns TRL's own trainer after two steps with so many tool calls an episode, and the lines of its log."""
    args = GRPOConfig(
        str(folder), per_device_train_batch_size=4, num_generations=4, max_steps=2, learning_rate=1e-2,
        max_completion_length=1024, max_tool_calling_iterations=calls, use_cpu=True, bf16=False, report_to=[],
        logging_steps=1, save_strategy="no", disable_tqdm=True, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = GRPOTrainer(model, args=args, processing_class=tokenizer, **parts)
    trainer.train()
    return trainer, [line for line in trainer.state.log_history if "reward" in line]
