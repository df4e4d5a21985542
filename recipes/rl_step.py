"""One RL step of GRPO with EPO's entropy terms, from tasks to gradient: what `EPOTrainer` computes, without TRL.

    python recipes/rl_step.py    # a tiny model learns which doors lead out of two rooms: some minutes on a CPU

The trainer has the same loss and gradient (tests/test_rl_step.py), and adds speed, memory, GPUs, checkpoints, methods.
"""

import epo_trl.threads  # noqa: F401 - before torch

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from epo_trl.envs.trap import TrapSuite
from epo_trl.models import build_model, build_tokenizer
from epo_trl.models.corpus import corpus
from epo_trl.models.generate import SamplingPolicy
from epo_trl.objectives import EntropyHistory, beta_schedule, smoothing_penalty
from epo_trl.rollout import ContextBuilder, PromptTemplate, RolloutSettings, play_episodes
from epo_trl.rollout.demonstrations import expert_episodes
from epo_trl.types import Episode, Turn

TASKS, GROUP, RL_STEPS = 8, 8, 60
LAMBDA, BAND = 0.001, {"alpha": 0.1, "kappa_low": 0.0, "kappa_high": 2.0}  # EPO's weight and band (Eq. 5)


def group_advantages(episodes: Sequence[Episode], group: int) -> list[float]:
    """Returns (return - mean of the group) / its standard deviation; an aborted episode is in no group, and has 0."""
    returns = torch.tensor([e.total_reward if e.is_usable else math.nan for e in episodes]).view(-1, group)
    centred = returns - returns.nanmean(1, keepdim=True)
    others = (centred.isfinite().sum(1, keepdim=True) - 1).clamp(min=1)
    std = (centred.nan_to_num().square().sum(1, keepdim=True) / others).sqrt()
    return (centred / (std + 1e-4)).nan_to_num().flatten().tolist()


def score(model: Any, turns: Sequence[Turn]) -> list[tuple[Tensor, Tensor]]:
    """Returns log-probabilities and entropies in nats, at the sampled tokens of each turn: a sequence of its own."""
    ids = [torch.tensor([*turn.prompt_ids, *turn.response_ids]) for turn in turns]
    rows = (
        model(pad_sequence(ids, batch_first=True)).logits.float().log_softmax(-1)
    )  # no token sees padding to its right
    scores = []
    for row, turn in zip(rows, turns, strict=True):
        log_p = row[len(turn.prompt_ids) - 1 :][: len(turn.response_ids)]  # position p - 1 predicts token p
        sampled = torch.tensor(turn.response_ids).unsqueeze(1)
        scores.append((log_p.gather(1, sampled).squeeze(1), -(log_p.exp() * log_p).sum(-1)))
    return scores


def backward(
    model: Any, episodes: Sequence[Episode], advantages: Sequence[float], history: EntropyHistory, beta: float
) -> tuple[float, float]:
    """Adds the gradient of the loss, episode by episode; returns the loss and the mean entropy of the tokens in nats.

    The policy loss is DAPO's mean over tokens. EPO's terms are means over episodes, turns and tokens (Eq. 4); beta
    weights the penalty for leaving the band around the mean entropy of earlier RL steps (Eq. 5 to 7).
    """
    usable = [pair for pair in zip(episodes, advantages, strict=True) if pair[0].is_usable]
    tokens = sum(len(turn.response_ids) for episode, _ in usable for turn in episode.turns)
    total = entropies = 0.0
    for episode, advantage in usable:
        loss = torch.zeros(())
        for logps, entropy in score(model, episode.turns):
            ratio = (logps - logps.detach()).exp()  # 1 in the first update on a batch, so nothing is clipped
            penalty = smoothing_penalty(entropy, history.reference(), **BAND)
            terms = (entropy - beta * penalty).mean() / len(episode.turns) / len(usable)
            loss = loss - (ratio * advantage).sum() / tokens - LAMBDA * terms
            entropies += entropy.sum().item() / tokens
        loss.backward()
        total += loss.item()
    return total, entropies


def imitate(model: Any, turns: Sequence[tuple[list[int], list[int]]], updates: int) -> None:
    """Trains on (prompt, answer) pairs of the expert: the warm start that teaches the form of an answer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for _ in range(updates):
        pairs = [turns[i] for i in torch.randint(len(turns), (32,)).tolist()]
        ids = pad_sequence([torch.tensor(p + answer) for p, answer in pairs], batch_first=True)
        labels = [torch.tensor([-100] * len(p) + answer) for p, answer in pairs]
        optimizer.zero_grad()
        model(input_ids=ids, labels=pad_sequence(labels, True, padding_value=-100)).loss.backward()
        optimizer.step()


def main() -> None:
    """Trains and prints the success of the episodes."""
    torch.manual_seed(0)
    suite = TrapSuite(rooms=2, liking=0.0)
    rules = RolloutSettings(max_turns=12, success_reward=1.0, require_think=False)
    tokenizer = build_tokenizer(corpus(suite, "corridor"))
    context = ContextBuilder(tokenizer, PromptTemplate.load("corridor"), history_length=0)
    model = build_model(tokenizer)
    tasks = list(zip(suite.task_ids("train")[:300], range(300), strict=True))  # with a seed, also of the expert
    shown = expert_episodes(suite, tasks, context, max_turns=12, keep_lost=True, thoughts=False)
    imitate(model, [(list(t.prompt_ids), list(t.response_ids)) for turns in shown for t in turns], 150)

    policy = SamplingPolicy(model, tokenizer, max_new_tokens=12)
    optimizer, history = torch.optim.AdamW(model.parameters(), lr=5e-4), EntropyHistory()
    for step in range(RL_STEPS):
        chosen = [tasks[i] for i in torch.randint(len(tasks), (TASKS,)).tolist() for _ in range(GROUP)]
        episodes = play_episodes([suite.make_env() for _ in chosen], chosen, policy.seeded(step), context, rules)
        beta = beta_schedule(step, RL_STEPS, start=2.0, end=1.0, decay=3.0)
        optimizer.zero_grad()
        loss, entropy = backward(model, episodes, group_advantages(episodes, GROUP), history, beta)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        history.append(entropy)
        won = sum(episode.won for episode in episodes)
        print(f"RL step {step + 1:2}: won {won} of {len(episodes)}, entropy {entropy:.3f}, loss {loss:+.3f}")


if __name__ == "__main__":
    main()
