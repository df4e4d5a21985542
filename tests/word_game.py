"""An environment as TRL's own documentation writes them: a class, a reward function, rows."""

WORDS = ("crane", "slate", "light")


class WordGame:
    """Guess a word of five letters."""

    def __init__(self):
        self.reward, self.done = 0.0, False

    def reset(self, **kwargs) -> str | None:
        self._hidden, self._left = kwargs["hidden"], 3
        self.reward, self.done = 0.0, False
        return "You have 3 guesses."

    def guess(self, guess: str) -> str:
        """
        Make a guess.

        Args:
            guess: The guessed word, formatted as '[abcde]'

        Returns:
            The feedback.
        """
        if self.done:
            raise ValueError("Game over.")
        word = guess.strip("[] ")
        if len(word) != 5:
            raise ValueError("You attempted an invalid move.")
        self._left -= 1
        right = sum(a == b for a, b in zip(word, self._hidden, strict=True))
        self.reward = 1.0 if right == 5 else right / 10
        self.done = right == 5 or self._left == 0
        return "G" * right + "X" * (5 - right)


def reward_func(environments, **kwargs):
    return [environment.reward for environment in environments]


def word_rows(count=6):
    prompt = [{"role": "system", "content": "You solve Wordle."}, {"role": "user", "content": "Play one game."}]
    return [{"prompt": prompt, "hidden": WORDS[i % len(WORDS)]} for i in range(count)]
