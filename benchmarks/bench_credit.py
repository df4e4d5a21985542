"""Credit assignment with a critic on a game with known optimal values, and the critic's error.

python benchmarks/bench_credit.py --seeds 0 1 2

Each run starts from a tiny model that takes doors at random, trained in seconds, and trains it with PPO, or with
ArCHer's critics. It reports the number of training episodes, averaged over WINDOW RL steps,
- "wins": until the share WON of them won,
- "way": until they took at most LENGTH times the turns of the best player,
success and turns over the last WINDOW steps, and, for `turn` and `archer`, the final distance between the critic's
value of every room and the optimal value; for `archer` also that of Q of the right door and of the other door.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from corridor import DOORS, CorridorSuite, door_on, optimal_value
from harness import write
from torch.nn.functional import cross_entropy

from epo_trl.models import build_model, build_tokenizer
from epo_trl.models.load import corpus
from epo_trl.rollout.context import ContextBuilder, TurnView
from epo_trl.rollout.templates import PromptTemplate
from epo_trl.scoring.reference import last_hidden_states
from epo_trl.trainers import EPOConfig, EPOPPOConfig, EPOPPOTrainer, EPOTrainer

ROOMS, MOVE_LIMIT = 6, 30
EPISODES, STEPS, EPOCHS = 32, 60, 4  # episodes per RL step, RL steps, updates per batch
GAMMA, REWARD = 0.9, 10.0
# A tiny model that meets "red" in one room produces it in all. If its first steps are large, or come before the critic
# distinguishes the rooms, it settles on one door everywhere and never sees what is behind the other. So the critic is
# trained alone first, the policy's learning rate is small, and the KL term preserves the start: either door half of the
# time, and the format. A plain entropy bonus would preserve the doors too, but it flattens tokens with one right
# choice.
WARM_UP, POLICY_RATE, CRITIC_RATE, KL = 10, 3e-4, 5e-3, 0.05  # RL steps, learning rates, TRL's beta
WON, LENGTH, WINDOW = 0.9, 1.25, 5
SHORTEST = (ROOMS + 1) / 2  # turns, averaged over the first rooms
WEIGHT_SCALE = 6.0
RESPONSE_TOKENS = 4  # <action> red </action> <|im_end|>
# `outcome` has no discount: it would apply within a turn's tokens, not between turns.
CREDITS = {
    "turn": {"gamma": GAMMA, "gae_lambda": 0.9},
    "token": {"gamma": GAMMA ** (1 / RESPONSE_TOKENS), "gae_lambda": 0.9 ** (1 / RESPONSE_TOKENS)},
    "outcome": {"gamma": 1.0, "gae_lambda": 1.0},
    # Two episodes per task, TRL's minimum; a small replay buffer, since this policy changes fast.
    "archer": {
        "method_kwargs": {"archer": {"gamma": GAMMA, "cut_ends": False, "replay_size": 2000, "hidden_size": 64}},
        "num_generations": 2,
    },
}
OF_PPO = ("critic_learning_rate", "critic_warmup_steps", "value_clip", "bootstrap_truncated")


def room_prompts(suite: CorridorSuite, context: ContextBuilder) -> list[list[int]]:
    """Returns the token ids of every room's prompt, in order."""
    views = []
    for number in range(suite.rooms):
        observation, info = suite.make_env().reset(options={"task_id": f"iid/{number}"})
        views.append(TurnView(observation, info, []))
    return [prompt.ids for prompt in context.build(views)]


def door_answers(tokenizer: Any) -> list[list[int]]:
    """Returns the token ids of each door's answer."""
    answers = [tokenizer(f"<action> {door} </action>")["input_ids"] + [tokenizer.eos_token_id] for door in DOORS]
    assert {len(answer) for answer in answers} == {RESPONSE_TOKENS}
    return answers


def start_model(suite: CorridorSuite, tokenizer: Any, seed: int) -> Any:
    """Creates a model that answers every room with either door, half of the time each."""
    model = build_model(tokenizer, hidden_size=32, heads=2, seed=seed)
    with torch.no_grad():  # the usual initialization suits a width of thousands: here all rooms would look alike
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(WEIGHT_SCALE)
    answers = door_answers(tokenizer)
    context = ContextBuilder(tokenizer, PromptTemplate.load("corridor"), history_length=0)
    rows = torch.tensor([prompt + answer for prompt in room_prompts(suite, context) for answer in answers])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(150):
        logits = model(rows[:, :-1]).logits[:, -RESPONSE_TOKENS:]
        loss = cross_entropy(logits.flatten(0, 1), rows[:, -RESPONSE_TOKENS:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def make_trainer(
    credit: str, seed: int, folder: str, *, rooms: int = ROOMS, move_limit: int = MOVE_LIMIT, steps: int = STEPS,
    **changes: Any,
) -> Any:  # fmt: skip
    """Creates the trainer of a run; `changes` override fields of its config."""
    suite = CorridorSuite(rooms, move_limit=move_limit)
    tokenizer = build_tokenizer(corpus(suite, "corridor"))
    settings = dict(
        credit=credit,
        **CREDITS[credit],
        per_device_train_batch_size=EPISODES,
        num_iterations=EPOCHS,
        max_steps=steps * EPOCHS,
        learning_rate=POLICY_RATE,
        lr_scheduler_type="constant",
        critic_learning_rate=CRITIC_RATE,
        critic_warmup_steps=WARM_UP * EPOCHS,
        value_clip=None,
        bootstrap_truncated=True,  # the rooms do not show the limit
        beta=KL,
        epo_lambda=0.0,
        smoothing_alpha=0.0,
        success_reward=REWARD,
        invalid_action_penalty=0.0,
        prompt_template="corridor",
        require_think=False,
        history_length=0,
        max_turns=move_limit,
        max_prompt_length=64,
        max_completion_length=8,
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        logging_steps=EPOCHS,
        report_to=[],
        disable_tqdm=True,
        seed=seed,
    )
    start = f"{folder}/start"  # a file, from which the trainer also loads the reference of the KL term
    start_model(suite, tokenizer, seed).save_pretrained(start)
    settings |= changes
    config: Any = EPOPPOConfig
    trainer: Any = EPOPPOTrainer
    if credit == "archer":
        config, trainer = EPOConfig, EPOTrainer
        warm_up = settings["critic_warmup_steps"] // settings["num_iterations"]
        settings["method_kwargs"] = {"archer": {**settings["method_kwargs"]["archer"], "warmup_rl_steps": warm_up}}
        settings = {name: value for name, value in settings.items() if name not in OF_PPO}
    return trainer(start, suite, args=config(folder, **settings), processing_class=tokenizer)


def optimal_values(rooms: int) -> list[float]:
    """Computes the value of every room under the optimal policy."""
    return [optimal_value(room + 1, rooms, gamma=GAMMA, reward=REWARD) for room in range(rooms)]


@torch.no_grad()
def room_values(trainer: Any) -> tuple[list[float], list[float]]:
    """Returns the critic's values of the rooms, and the optimal ones."""
    ids = torch.tensor(room_prompts(trainer.suite, trainer.rules.context))
    if trainer.has_critic:
        values = trainer.model(input_ids=ids, values_only=True).state_values[:, -1]
    else:
        values = trainer.methods["archer"].critics.v(_frozen(trainer, ids)[:, -1]).amin(0)
    return values.tolist(), optimal_values(trainer.suite.rooms)


@torch.no_grad()
def door_values(trainer: Any) -> tuple[list[float], list[float]]:
    """Returns ArCHer's Q of the door that leads on and of the other door, room by room, and the optimal values."""
    rooms, found, optimal = trainer.suite.rooms, [], []
    values = [*optimal_values(rooms), REWARD / GAMMA]  # leaving pays REWARD
    for room, prompt in enumerate(room_prompts(trainer.suite, trainer.rules.context)):
        rows = torch.tensor([prompt + answer for answer in door_answers(trainer.processing_class)])
        hidden = _frozen(trainer, rows)
        states, actions = hidden[:, len(prompt) - 1], hidden[:, len(prompt) :].mean(1)
        found += trainer.methods["archer"].critics.q(states, actions).amin(0).tolist()
        optimal += [GAMMA * (values[room + 1] if door == door_on(room + 1) else values[0]) for door in DOORS]
    return found, optimal


def _frozen(trainer: Any, ids: torch.Tensor) -> torch.Tensor:
    return last_hidden_states(trainer.ref_model, trainer.ref_model.base_model, ids)


def episodes_until(reached: Callable[[float], bool], series: list[float]) -> str:
    """Returns the episodes played until the mean over `WINDOW` RL steps reached the target, else `"never"`."""
    for end in range(WINDOW, len(series) + 1):
        if reached(statistics.mean(series[end - WINDOW : end])):
            return str(end * EPISODES)
    return "never"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--credits", nargs="+", choices=CREDITS, default=["turn", "outcome"])
    parser.add_argument("--steps", type=int, default=STEPS, help="RL steps of each run")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--kl", type=float, default=KL, help="beta")
    parser.add_argument("--turn_penalty", type=float, default=0.0, help="cost of a turn, where a win pays 10")
    parser.add_argument("--entropy_bonus", type=float, default=0.0, help="epo_lambda")
    parser.add_argument("--rate", type=float, default=POLICY_RATE, help="learning_rate")
    parser.add_argument("--warm_up", type=int, default=WARM_UP, help="RL steps that train only the critic")
    args = parser.parse_args()
    lines, results = [], []
    for credit in args.credits:
        for seed in args.seeds:
            with tempfile.TemporaryDirectory() as folder:
                trainer = make_trainer(
                    credit, seed, folder, steps=args.steps, beta=args.kl, epo_lambda=args.entropy_bonus,
                    learning_rate=args.rate, critic_warmup_steps=args.warm_up * EPOCHS, turn_penalty=args.turn_penalty,
                )  # fmt: skip
                start = time.perf_counter()
                trainer.train()
            won, turns = (
                [line[name] for line in trainer.state.log_history if name in line]
                for name in ("env/success_rate", "env/turns")
            )
            until = (
                episodes_until(lambda x: x >= WON, won),
                episodes_until(lambda x: x <= LENGTH * SHORTEST, turns),
            )
            results.append({"credit": credit, "seed": seed, "until": until, "won": won, "turns": turns})
            line = f"{credit:8} {seed:4} {until[0]:>6} {until[1]:>6}"
            line += f" {statistics.mean(won[-WINDOW:]):8.0%} {statistics.mean(turns[-WINDOW:]):6.1f}"
            for ask in {"turn": [room_values], "archer": [room_values, door_values]}.get(credit, []):
                errors = [abs(value - best) for value, best in zip(*ask(trainer), strict=True)]
                line += f" {statistics.mean(errors):8.2f} {max(errors):6.2f}"
            lines.append(f"{line:72} {time.perf_counter() - start:8.0f}")
    print("credit   seed   wins    way  success  turns    error    max  Q error    max  seconds")
    print("\n".join(lines))
    write(args.json, options=vars(args), results=results)


if __name__ == "__main__":
    main()
