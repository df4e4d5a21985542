"""Turn, token and outcome credit on a game whose optimal values are known, and the critic's error there.

python benchmarks/bench_credit.py --seeds 0 1 2

Each run starts from a tiny model that takes doors at random, learned in seconds, and trains it with PPO. Reported are
the training episodes that it took, averaged over WINDOW RL steps,
- "wins": until the share WON of them won,
- "way": until they took no more than LENGTH times the turns of the best player,
success and turns over the last WINDOW steps, and, with turn credit, the distance between the critic's value of every
room and the optimal one at the end.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from harness import write
from torch.nn.functional import cross_entropy

from epo_trl.envs.corridor import DOORS, CorridorSuite, optimal_value
from epo_trl.models import build_model, build_tokenizer
from epo_trl.models.load import corpus
from epo_trl.rollout.context import TurnView
from epo_trl.trainers import EPOPPOConfig, EPOPPOTrainer

ROOMS, MOVE_LIMIT = 6, 30
EPISODES, STEPS, EPOCHS = 32, 60, 4  # episodes of an RL step, RL steps, updates on one batch
GAMMA, REWARD = 0.9, 10.0
ENTROPY_BONUS = 0.03  # lambda of L_H; without it some runs settle on a wrong door before they have tried the right one
WON, LENGTH, WINDOW = 0.9, 1.25, 5
SHORTEST = (ROOMS + 1) / 2  # turns, on average over the first rooms
WEIGHT_SCALE = 6.0
RESPONSE_TOKENS = 4  # <action> red </action> <|im_end|>
# `outcome` has no discount: it would fall within a turn's tokens, not between turns.
CREDITS = {
    "turn": {"gamma": GAMMA, "gae_lambda": 0.9},
    "token": {"gamma": GAMMA ** (1 / RESPONSE_TOKENS), "gae_lambda": 0.9 ** (1 / RESPONSE_TOKENS)},
    "outcome": {"gamma": 1.0, "gae_lambda": 1.0},
}


def room_prompts(trainer: EPOPPOTrainer) -> list[list[int]]:
    """Returns the token ids of the prompt of every room, in order."""
    views = []
    for number in range(ROOMS):
        observation, info = trainer.suite.make_env().reset(options={"task_id": f"iid/{number}"})
        views.append(TurnView(observation, info, []))
    return [prompt.ids for prompt in trainer.context.build(views)]


def learn_the_form(trainer: EPOPPOTrainer) -> None:
    """Trains the policy to answer every room with either door, half of the time each."""
    tokenizer, model = trainer.processing_class, trainer.model
    answers = [tokenizer(f"<action> {door} </action>")["input_ids"] + [tokenizer.eos_token_id] for door in DOORS]
    assert {len(answer) for answer in answers} == {RESPONSE_TOKENS}
    rows = torch.tensor([prompt + answer for prompt in room_prompts(trainer) for answer in answers])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(150):
        logits = model(rows[:, :-1]).logits[:, -RESPONSE_TOKENS:]
        loss = cross_entropy(logits.flatten(0, 1), rows[:, -RESPONSE_TOKENS:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.zero_grad()
    trainer.critic.trunk.load_state_dict(model.base_model.state_dict())  # it starts where the policy does


def make_trainer(
    credit: str, seed: int, folder: str, *, steps: int = STEPS, entropy_bonus: float = ENTROPY_BONUS
) -> EPOPPOTrainer:
    """Returns the trainer of a run."""
    suite = CorridorSuite(ROOMS, move_limit=MOVE_LIMIT)
    tokenizer = build_tokenizer(corpus(suite, "corridor"))
    args = EPOPPOConfig(
        folder,
        credit=credit,
        **CREDITS[credit],
        per_device_train_batch_size=EPISODES,
        num_iterations=EPOCHS,
        max_steps=steps * EPOCHS,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        critic_learning_rate=5e-3,
        value_clip=None,
        epo_lambda=entropy_bonus,
        smoothing_alpha=0.0,
        success_reward=REWARD,
        invalid_action_penalty=0.0,
        prompt_template="corridor",
        require_think=False,
        history_length=0,
        max_turns=MOVE_LIMIT,
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
    model = build_model(tokenizer, hidden_size=32, heads=2, seed=seed)
    with torch.no_grad():  # the usual size of fresh weights suits a width of thousands: here all rooms would look alike
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(WEIGHT_SCALE)
    return EPOPPOTrainer(model, suite, args=args, processing_class=tokenizer)


@torch.no_grad()
def room_values(trainer: EPOPPOTrainer) -> tuple[list[float], list[float]]:
    """Returns the critic's values of the rooms, and the optimal ones."""
    ids = torch.tensor(room_prompts(trainer))
    values = trainer.model(input_ids=ids, values_only=True).state_values[:, -1]
    return values.tolist(), [optimal_value(r + 1, ROOMS, gamma=GAMMA, reward=REWARD) for r in range(ROOMS)]


def episodes_until(reached: Callable[[float], bool], series: list[float]) -> str:
    """Returns the episodes played until the mean over `WINDOW` RL steps was good enough, `"never"` if it never was."""
    for end in range(WINDOW, len(series) + 1):
        if reached(statistics.mean(series[end - WINDOW : end])):
            return str(end * EPISODES)
    return "never"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--credits", nargs="+", choices=CREDITS, default=["turn", "outcome"])
    parser.add_argument("--steps", type=int, default=STEPS, help="RL steps of each run")
    parser.add_argument("--json", type=Path, help="write what was measured to this file")
    parser.add_argument("--entropy_bonus", type=float, default=ENTROPY_BONUS, help="epo_lambda")
    args = parser.parse_args()
    lines, results = [], []
    for credit in args.credits:
        for seed in args.seeds:
            with tempfile.TemporaryDirectory() as folder:
                trainer = make_trainer(credit, seed, folder, steps=args.steps, entropy_bonus=args.entropy_bonus)
                learn_the_form(trainer)
                start = time.perf_counter()
                trainer.train()
            won, turns = (
                [line[name] for line in trainer.state.log_history if name in line]
                for name in ("env/success_rate", "env/turns")
            )
            until = episodes_until(lambda x: x >= WON, won), episodes_until(lambda x: x <= LENGTH * SHORTEST, turns)
            results.append({"credit": credit, "seed": seed, "until": until, "won": won, "turns": turns})
            line = f"{credit:8} {seed:4} {until[0]:>6} {until[1]:>6}"
            line += f" {statistics.mean(won[-WINDOW:]):8.0%} {statistics.mean(turns[-WINDOW:]):6.1f}"
            if credit == "turn":
                values, optimal = room_values(trainer)
                errors = [abs(v - o) for v, o in zip(values, optimal, strict=True)]
                line += f" {statistics.mean(errors):8.2f} {max(errors):6.2f}"
            lines.append(f"{line:56} {time.perf_counter() - start:8.0f}")
    print("credit   seed   wins    way  success  turns    error    max  seconds")
    print("\n".join(lines))
    write(args.json, options=vars(args), results=results)


if __name__ == "__main__":
    main()
