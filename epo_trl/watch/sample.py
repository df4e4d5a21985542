"""Stored episodes: their selection, the texts and entropies of their tokens, and their JSON Lines files."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

from epo_trl.errors import InputError
from epo_trl.runs.files import write_atomically
from epo_trl.types import Episode

DIGITS = 3  # decimals of a stored entropy


@dataclass(frozen=True, slots=True)
class TurnTexts:
    """The prompt, tokens and entropies of a turn."""

    prompt: str = ""  # with control tokens; "" if it was not stored
    tokens: tuple[str, ...] = ()  # of the response; empty if they were not stored
    entropy: tuple[float, ...] = ()  # of each token's sampling distribution, in nats; empty if unknown


@dataclass(frozen=True, slots=True)
class Sample:
    """A stored episode."""

    episode: Episode  # without token ids
    texts: tuple[TurnTexts, ...]  # of each turn
    split: str = "train"  # or the name of the evaluated list
    rl_step: int = 0  # from 1; 0 in an evaluation
    why: str = ""  # reason for its selection, see `choose`
    group: int = 0  # number of its group in the batch

    def with_entropy(self, values: Sequence[float]) -> Sample:
        """Returns the sample with entropies in nats, ordered by turn and token.

        It is unchanged if their number is not the number of tokens, or one is not finite.
        """
        if len(values) != sum(len(text.tokens) for text in self.texts) or not all(map(math.isfinite, values)):
            return self
        rounded = (round(value, DIGITS) for value in values)
        texts = (replace(text, entropy=tuple(islice(rounded, len(text.tokens)))) for text in self.texts)
        return replace(self, texts=tuple(texts))

    def to_dict(self) -> dict[str, Any]:
        """Returns the sample as JSON values."""
        content: dict[str, Any] = asdict(self.episode.without_tokens())
        del content["final_info"]
        for turn, text in zip(content["turns"], self.texts, strict=True):
            for ids in ("prompt_ids", "response_ids", "logprobs"):
                del turn[ids]
            turn |= {"prompt": text.prompt, "tokens": list(text.tokens), "entropy": list(text.entropy)}
        own = {"split": self.split, "rl_step": self.rl_step, "why": self.why, "group": self.group}
        return own | content

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Sample:
        """Creates a sample from the output of `to_dict`."""
        texts = tuple(TurnTexts(one["prompt"], tuple(one["tokens"]), tuple(one["entropy"])) for one in data["turns"])
        return cls(Episode.from_dict(data), texts, *(data[name] for name in ("split", "rl_step", "why", "group")))


def sample_of(episode: Episode, texts: Sequence[TurnTexts] | None = None, **about: Any) -> Sample:
    """Creates the sample of an episode without its token ids. `about` are the other fields of `Sample`."""
    turns = tuple(TurnTexts() for _ in episode.turns) if texts is None else tuple(texts)
    return Sample(episode.without_tokens(), turns, **about)


class Outcome(NamedTuple):
    """The data of an episode that selection depends on."""

    reward: float  # in total
    usable: bool  # see `Episode.is_usable`
    group: int = 0  # number of the episode's group, whose members play the same task


def choose(outcomes: Sequence[Outcome], count: int, draw: random.Random) -> dict[int, str]:
    """Selects at most `count` episodes; returns their indices with the reason for each.

    The order is: the worst and the best by reward if they differ, then an aborted one, then random ones. Ties for the
    worst are broken in favour of the best episode's group, so the two can be compared turn by turn.
    """
    usable = [i for i, outcome in enumerate(outcomes) if outcome.usable]
    chosen: dict[int, str] = {}
    if usable:
        best = max(usable, key=lambda i: outcomes[i].reward)
        worst = min(usable, key=lambda i: (outcomes[i].reward, outcomes[i].group != outcomes[best].group))
        if outcomes[worst].reward < outcomes[best].reward:
            chosen |= {worst: "worst", best: "best"}
    aborted = [i for i, outcome in enumerate(outcomes) if not outcome.usable]
    chosen |= dict.fromkeys(aborted[:1], "aborted")
    others = [i for i in range(len(outcomes)) if i not in chosen]
    chosen |= dict.fromkeys(draw.sample(others, len(others)), "random")
    return dict(list(chosen.items())[:count])


def choose_samples(episodes: Sequence[Episode], count: int, draw: random.Random, *, split: str) -> list[Sample]:
    """Selects at most `count` episodes of an evaluation with `choose`."""
    outcomes = [Outcome(episode.total_reward, episode.is_usable) for episode in episodes]
    return [sample_of(episodes[i], split=split, why=why) for i, why in choose(outcomes, count, draw).items()]


def write_samples(path: str | os.PathLike[str], samples: Iterable[Mapping[str, Any]]) -> None:
    """Writes samples, as returned by `Sample.to_dict`, to a JSON Lines file atomically, and creates its folder."""
    write_atomically(path, "".join(json.dumps(sample, allow_nan=False) + "\n" for sample in samples))


def read_samples(path: str | os.PathLike[str]) -> list[Sample]:
    """Reads the samples of a file.

    Raises:
        InputError: If a line is not a sample.
    """
    samples = []
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            try:
                samples.append(Sample.from_dict(json.loads(line)))
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(f"{os.fspath(path)}, line {number}, is not an episode ({error!r})") from error
    return samples
