"""One RL step of GRPO with EPO's entropy terms, from tasks to gradient: what `EPOTrainer` computes, without TRL.

    python recipes/rl_step.py    # a tiny model learns which doors lead out of two rooms: a minute on a CPU

Loss and gradient are those of `EPOTrainer` (tests/test_rl_step.py). The trainer adds speed, bounded memory, several
GPUs, checkpoints and the other methods; nothing here is batched, so that each line is one idea.
"""

import epo_trl.threads  # isort: split  # before torch

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

TASKS, GROUP, RL_STEPS, MAX_TURNS = 8, 8, 60, 12
LAMBDA, ALPHA, KAPPA_LOW, KAPPA_HIGH = 0.001, 0.1, 0.0, 2.0  # EPO: weight, and the band of its history (Eq. 5)


def group_advantages(episodes: Sequence[Episode], group: int) -> list[float]:
    """Returns each episode's return, minus the mean of its group, divided by the group's standard deviation.

    An aborted episode counts in no group, and has no advantage.
    """
    advantages = []
    for start in range(0, len(episodes), group):
        members = episodes[start : start + group]
        returns = torch.tensor([episode.total_reward for episode in members if episode.is_usable])
        differ = len(returns) > 1 and bool(returns.max() > returns.min())
        for episode in members:
            differs = differ and episode.is_usable
            score = (episode.total_reward - returns.mean()) / (returns.std() + 1e-4) if differs else 0.0
            advantages.append(float(score))
    return advantages


def score(model: Any, turn: Turn) -> tuple[Tensor, Tensor]:
    """Returns the log-probability of each sampled token and the entropy at it, in nats; both (tokens,).

    A turn is a sequence of its own: its prompt holds what the agent may see (windowed context).
    """
    ids = torch.tensor([[*turn.prompt_ids, *turn.response_ids]])
    log_p = model(ids).logits[0, len(turn.prompt_ids) - 1 : -1].float().log_softmax(-1)
    sampled = torch.tensor(turn.response_ids).unsqueeze(1)
    return log_p.gather(1, sampled).squeeze(1), -(log_p.exp() * log_p).sum(-1)


def backward(
    model: Any, episodes: Sequence[Episode], advantages: Sequence[float], history: EntropyHistory, beta: float
) -> tuple[float, float]:
    """Adds the gradient of the loss, turn by turn; returns the loss and the mean entropy of the tokens in nats.

    The policy loss is a mean over tokens (DAPO's). EPO's terms are means over episodes, their turns and their tokens
    (Eq. 4), and beta weights the penalty for leaving the band around the mean entropy of earlier RL steps (Eq. 5 to 7).
    """
    usable = [(e, a) for e, a in zip(episodes, advantages, strict=True) if e.is_usable]
    tokens = sum(len(turn.response_ids) for episode, _ in usable for turn in episode.turns)
    total = entropies = 0.0
    for episode, advantage in usable:
        for turn in episode.turns:
            logps, entropy = score(model, turn)
            ratio = (logps - logps.detach()).exp()  # 1 in the first update on a batch, so nothing is clipped
            band = {"kappa_low": KAPPA_LOW, "kappa_high": KAPPA_HIGH, "alpha": ALPHA}
            penalty = smoothing_penalty(entropy, history.reference(), **band)
            terms = (entropy - beta * penalty).mean() / len(episode.turns) / len(usable)
            loss = -(ratio * advantage).sum() / tokens - LAMBDA * terms
            loss.backward()
            total += loss.item()
            entropies += entropy.sum().item() / tokens
    return total, entropies


def imitate(model: Any, turns: Sequence[tuple[list[int], list[int]]], updates: int) -> None:
    """Trains on (prompt, answer) pairs of the expert: the warm start that teaches the form of an answer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for _ in range(updates):
        pairs = [turns[i] for i in torch.randint(len(turns), (32,)).tolist()]
        ids = pad_sequence([torch.tensor(p + r) for p, r in pairs], batch_first=True)
        labels = pad_sequence([torch.tensor([-100] * len(p) + r) for p, r in pairs], batch_first=True, padding_value=-100)
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()


def main() -> None:
    """Trains and prints the success of the training episodes."""
    torch.manual_seed(0)
    suite, rules = TrapSuite(rooms=2, liking=0.0), RolloutSettings(max_turns=MAX_TURNS, success_reward=1.0, require_think=False)
    tokenizer = build_tokenizer(corpus(suite, "corridor"))
    model = build_model(tokenizer)
    context = ContextBuilder(tokenizer, PromptTemplate.load("corridor"), history_length=0)
    tasks = list(zip(suite.task_ids("train")[:300], range(300), strict=True))  # with a seed, also of the expert
    shown = expert_episodes(suite, tasks, context, max_turns=MAX_TURNS, keep_lost=True, thoughts=False)
    imitate(model, [(list(t.prompt_ids), list(t.response_ids)) for turns in shown for t in turns], 150)

    policy = SamplingPolicy(model, tokenizer, max_new_tokens=12)
    optimizer, history = torch.optim.AdamW(model.parameters(), lr=5e-4), EntropyHistory()
    for step in range(RL_STEPS):
        chosen = [tasks[i] for i in torch.randint(len(tasks), (TASKS,)).tolist() for _ in range(GROUP)]
        episodes = play_episodes([suite.make_env() for _ in chosen], chosen, policy.seeded(step), context, rules)
        advantages = group_advantages(episodes, GROUP)
        beta = beta_schedule(step, RL_STEPS, start=2.0, end=1.0, decay=3.0)
        optimizer.zero_grad()
        loss, entropy = backward(model, episodes, advantages, history, beta)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        history.append(entropy)
        won = sum(episode.won for episode in episodes) / len(episodes)
        print(f"RL step {step + 1:2}  won {won:4.0%}  entropy {entropy:.3f}  loss {loss:+.4f}", flush=True)


if __name__ == "__main__":
    main()
