"""A game for TRL's `environment_factory`, with nothing of epo_trl but the expert: find a number."""

import random

from epo_trl.envs.tools.suite import tool_call

SIZE = 8
PROMPT = [{"role": "user", "content": f"find the number between 1 and {SIZE}"}]


class HighLow:
    """Hides a number."""

    def __init__(self):
        self.hidden, self.reward, self.done = 0, 0.0, False

    def reset(self, hidden: int, **row) -> str:
        self.hidden, self.reward, self.done = hidden, 0.0, False
        return "The number is hidden."

    def guess(self, number: int) -> str:
        """
        Guess the number.

        Args:
            number: The guess

        Returns:
            Whether the hidden number is higher or lower.
        """
        if self.done:
            raise ValueError("Game over.")
        if not 1 <= number <= SIZE:
            raise ValueError(f"{number} is not between 1 and {SIZE}")
        if number == self.hidden:
            self.reward, self.done = 1.0, True
            return "Right!"
        return f"It is higher than {number}." if number < self.hidden else f"It is lower than {number}."

    def get_reward(self) -> float:
        return self.reward


def rows(split: str) -> list[dict]:
    chance = random.Random(split)
    return [{"prompt": PROMPT, "hidden": chance.randint(1, SIZE)} for _ in range(200 if split == "train" else 40)]


def train_rows():
    return rows("train")


def test_rows():
    return rows("iid")


class Expert:
    """An expert for a warm start: it bisects the range after a random first guess."""

    def __init__(self, seed: int):
        self.chance = random.Random(seed)

    def reset(self, observation, info):
        self.least, self.most = 1, SIZE

    def act(self, observation, info):
        heard = observation.rstrip(".").split()
        if "higher" in heard:
            self.least = max(self.least, int(heard[-1]) + 1)
        elif "lower" in heard:
            self.most = min(self.most, int(heard[-1]) - 1)
        return f"It is from {self.least} to {self.most}.", tool_call(
            "guess", number=self.chance.randint(self.least, self.most)
        )
