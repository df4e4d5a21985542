"""TreasureHunt as somebody else's environment, and a policy that opens its boxes at random."""

import random
from dataclasses import dataclass

from rollout_parts import answer, byte_tokenizer, ids_of

from epo_trl.envs.toy import ToySuite

TOKENIZER = byte_tokenizer()
TOY = f"{__name__}:ToyArguments"  # for --environment


@dataclass
class ToyArguments:
    """TreasureHunt, as somebody else's environment."""

    move_limit: int = 30
    rules: str = "alfworld-tiny20"

    def make_suite(self):
        suite = ToySuite(move_limit=self.move_limit)
        suite.protocol = self.rules
        return suite


class RandomPolicy:
    """Opens boxes at random, or says no action. Depends on its seed and on all that it has said; calls are counted."""

    eos_ids = (TOKENIZER.eos_token_id,)

    def __init__(self, on_call=lambda: None, seed=0):
        self.on_call, self.rng = on_call, random.Random(seed)

    def seeded(self, seed):
        return RandomPolicy(self.on_call, seed)

    def __call__(self, prompt_ids):
        self.on_call()
        said = ["I just act", *(answer(f"open {color} box") for color in "red blue green white black".split())]
        texts = [self.rng.choice(said) for _ in prompt_ids]
        return [[*ids_of(TOKENIZER, text), TOKENIZER.eos_token_id] for text in texts], None
