"""PPO on episodes made by hand: its batches, its gradients, and batches of values."""

import random
from dataclasses import replace

from trainer_kit import batches_of, catch_step, make_episode, make_ppo, with_episodes

from epo_trl.types import StopReason

STATES = [[20, 21, 22], [23], [24, 25], [], [26], [], [], [27, 28]]  # after the last turn of `make_episodes()`


def inject(trainer):
    """Lets the trainer "play" the episodes made by hand; returns the batches that come out of them."""
    with_episodes(trainer)._final_states = lambda episodes: [list(state) for state in STATES]
    return batches_of(trainer)


def is_critic(name):
    return "critic." in name


def parts(gradients):
    """Returns the policy's and the critic's share of named tensors."""
    policy = {name: value for name, value in gradients.items() if not is_critic(name)}
    critic = {name: value for name, value in gradients.items() if is_critic(name)}
    assert policy and critic
    return policy, critic


def paid(*rewards, stop=StopReason.TURN_LIMIT):
    """Returns an episode of one turn for each reward."""
    episode = make_episode([(4, 1 + i % 3) for i in range(len(rewards))], 0.0, random.Random(len(rewards)), stop=stop)
    turns = tuple(replace(turn, reward=reward) for turn, reward in zip(episode.turns, rewards, strict=True))
    return replace(episode, turns=turns, won=stop is StopReason.WON)


def step_on(folder, episodes, *, make=make_ppo, **changes):
    """Returns a trainer after one optimizer step on these episodes, the batch, and the gradients."""
    trainer = make(folder, per_device_train_batch_size=len(episodes), **{"epo_lambda": 0.0, **changes})
    with_episodes(trainer, episodes)
    if make is make_ppo:
        trainer._final_states = lambda episodes: [[20 + i] * (e.stop is StopReason.TURN_LIMIT)
                                                  for i, e in enumerate(episodes)]  # fmt: skip
    batches = batches_of(trainer)
    _, gradients = catch_step(trainer)
    return trainer, batches[0], gradients
