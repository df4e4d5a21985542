"""An episode that was kept, with the texts and entropies of its tokens, and the JSON lines it is kept in."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from epo_trl.long_runs.state_file import write_whole
from epo_trl.types import Episode

MAX_CHARS = 20_000  # of one text
DIGITS = 3  # that are kept of an entropy
_KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,), "bool": (bool,), "int": (int,), "float": (int, float), "float | None": (int, float, type(None)),
}  # fmt: skip


class WatchError(ValueError):
    """There are no episodes to show, or a file of them is damaged. The message names it."""


@dataclass(frozen=True, slots=True)
class TurnTexts:
    """What else is kept of a turn.

    Args:
        prompt: As the policy read it, control tokens included; `""` if it was not kept.
        tokens: The response, token by token; empty if it was not kept that way.
        entropy: Of the distribution that each token was sampled from, in nats, or empty if it is not known.
    """

    prompt: str = ""
    tokens: tuple[str, ...] = ()
    entropy: tuple[float, ...] = ()

    def mean_entropy(self) -> float | None:
        """Returns the mean over the tokens, in nats, or `None` if it is not known."""
        return math.fsum(self.entropy) / len(self.entropy) if self.entropy else None


@dataclass(frozen=True, slots=True)
class Sample:
    """An episode that was kept.

    Args:
        episode: Without token ids.
        texts: One for each turn.
        split: `"train"`, or the list that was evaluated.
        rl_step: The RL step that it was played for, from 1; 0 in an evaluation.
        why: Why it was chosen, see `choose`.
        group: Number of its group in the batch.
    """

    episode: Episode
    texts: tuple[TurnTexts, ...]
    split: str = "train"
    rl_step: int = 0
    why: str = ""
    group: int = 0

    def with_entropy(self, values: Sequence[float]) -> Sample:
        """Returns the sample with the entropy of each sampled token, or as it is if there are not as many as tokens.

        Args:
            values: In nats, in the order of turns and tokens. None is kept if one of them is not finite.
        """
        if len(values) != sum(len(text.tokens) for text in self.texts) or not all(map(math.isfinite, values)):
            return self
        texts, start = [], 0
        for text in self.texts:
            end = start + len(text.tokens)
            texts.append(replace(text, entropy=tuple(round(value, DIGITS) for value in values[start:end])))
            start = end
        return replace(self, texts=tuple(texts))

    def to_dict(self) -> dict[str, Any]:
        """Returns the sample as JSON values. Long texts are cut, and say so."""
        content: dict[str, Any] = asdict(self.episode.without_tokens())
        del content["final_info"]
        for turn, text in zip(content["turns"], self.texts, strict=True):
            for ids in ("prompt_ids", "response_ids", "logprobs"):
                del turn[ids]
            turn |= {"prompt": text.prompt, "tokens": list(text.tokens), "entropy": list(text.entropy)}
        own = {"split": self.split, "rl_step": self.rl_step, "why": self.why, "group": self.group}
        return own | {name: _cut(value) for name, value in content.items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Sample:
        """Returns the sample of such values.

        Raises:
            ValueError: If they are none.
        """
        try:
            texts = tuple(_texts(turn) for turn in data["turns"])
            own = {name: data[name] for name in ("split", "rl_step", "why", "group")}
            sample = cls(Episode.from_dict(data), texts, **own)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        for part in (sample, sample.episode, *sample.episode.turns, *texts):
            _check_kinds(part)
        return sample


def sample_of(episode: Episode, texts: Sequence[TurnTexts] | None = None, **about: Any) -> Sample:
    """Returns the sample of an episode.

    Args:
        episode: With or without token ids, which are not kept.
        texts: One for each turn; `None` if there is nothing but the episode.
        about: The other fields of `Sample`.
    """
    turns = tuple(TurnTexts() for _ in episode.turns) if texts is None else tuple(texts)
    return Sample(episode.without_tokens(), turns, **about)


def write_samples(path: str | os.PathLike[str], samples: Iterable[Mapping[str, Any]]) -> None:
    """Writes a file with one line for each sample, whole or not at all, and makes its folder.

    Args:
        path: The file.
        samples: Return values of `Sample.to_dict`.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "".join(json.dumps(sample, allow_nan=False) + "\n" for sample in samples))


def read_samples(path: str | os.PathLike[str]) -> list[Sample]:
    """Returns the samples of a file.

    Raises:
        WatchError: If a line of it is no sample.
    """
    samples = []
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            try:
                samples.append(Sample.from_dict(json.loads(line)))
            except ValueError as error:
                raise WatchError(f"{os.fspath(path)}, line {number}, is no episode ({error})") from error
    return samples


def _texts(turn: Mapping[str, Any]) -> TurnTexts:
    tokens, entropy = tuple(map(str, turn.get("tokens", ()))), tuple(map(float, turn.get("entropy", ())))
    if entropy and len(entropy) != len(tokens) or not all(map(math.isfinite, entropy)):
        raise ValueError(f"a turn has {len(tokens)} tokens, and as entropies not as many finite numbers")
    return TurnTexts(turn.get("prompt", ""), tokens, entropy)


def _check_kinds(part: Any) -> None:
    """Raises `ValueError` if a field of a dataclass is no text or number although it should be."""
    for field in fields(part):
        value, kind = getattr(part, field.name), _KINDS.get(str(field.type))
        if kind and (not isinstance(value, kind) or isinstance(value, float) and not math.isfinite(value)):
            raise ValueError(f"{field.name}: expected {field.type}, got {value!r:.60}")


def _cut(value: Any) -> Any:
    """Returns JSON values whose long texts have lost their middle, with a note in its place."""
    if isinstance(value, str) and len(value) > MAX_CHARS:
        half = MAX_CHARS // 2
        return f"{value[:half]} [... {len(value) - 2 * half} characters left out ...] {value[-half:]}"
    if isinstance(value, dict):
        return {name: _cut(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_cut(inner) for inner in value]
    return value
