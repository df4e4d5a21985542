"""Heads of several model families, and a mixture of experts."""

import torch
from trainer_kit import make_model
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from epo_trl.methods.lm_head import LMHead


def head_of(probabilities, **settings):
    """Returns a head whose positions have these distributions, and the logits."""
    logits = torch.tensor(probabilities, dtype=torch.float64).log().requires_grad_()
    given = {"bias": None, "temperature": 1.0, "softcap": None, "scale": 1.0, **settings}
    return LMHead(logits, torch.eye(logits.shape[1], dtype=torch.float64), **given), logits


def untied():
    torch.manual_seed(0)
    model = make_model()
    model.lm_head.weight = torch.nn.Parameter(0.4 * torch.randn_like(model.lm_head.weight))
    return model


def nucleus_entropy_of(logits, reference, cut):
    """Returns the entropies of (T, V) logits inside the reference's nucleus, 0 where it has one token."""
    inside = reference.softmax(-1) > cut
    log_q = logits.masked_fill(~inside, -1e9).log_softmax(-1)
    entropy = -(log_q.exp() * log_q).sum(-1)
    return torch.where(inside.sum(-1) > 1, entropy, 0.0 * entropy)


def disturbed(model, size=0.05):
    """Returns a copy of a model that has moved."""
    moved = type(model)(model.config)
    moved.load_state_dict(model.state_dict())
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(5)
        for parameter in moved.parameters():
            parameter += size * parameter.abs().mean() * torch.randn_like(parameter)
    return moved.eval()


def other(config, model, **sizes):
    torch.manual_seed(0)
    made = model(config(vocab_size=80, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                        num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=False, **sizes))  # fmt: skip
    for parameter in made.parameters():
        parameter.data.normal_(0, 0.3)
    return made.eval()


def make_mixture():
    """Returns a small mixture of experts with weights so large that its routers distinguish tokens."""
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, moe_intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
        max_position_embeddings=512,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(12)
    return model


HEADS = {
    "tied": make_model,
    "untied": untied,
    "soft cap": lambda: make_model("gemma2"),
    "scaled": lambda: other(CohereConfig, CohereForCausalLM, logit_scale=0.7),
    "divided": lambda: other(GraniteConfig, GraniteForCausalLM, logits_scaling=0.7),
    "bias": lambda: other(PhiConfig, PhiForCausalLM),
}


# Two episodes of two turns; response tokens are those with a 1.
IDS = torch.tensor([[10, 11, 12, 13, 14, 20, 21, 22], [0, 15, 16, 25, 26, 27, 28, 0]])


TURNS = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, -1]])


RESPONSE = torch.tensor([[1, 1, 0, 0, 1], [0, 0, 1, 1, 0]])


PROMPTS = torch.tensor([3, 2])
