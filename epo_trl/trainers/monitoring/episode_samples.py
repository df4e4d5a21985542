"""Saves a few episodes of some RL steps in the run folder, for `epo-trl watch`.

Each of those RL steps has one file, which a resumed run rewrites if it repeats the step. The entropies are those under
the behaviour policy, which the update computes anyway.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from epo_trl.methods import Comm
from epo_trl.trainers.config import EPOConfig
from epo_trl.types import Episode, Turn
from epo_trl.watch.sample import Outcome, Sample, TurnTexts, choose, sample_of, write_samples
from epo_trl.watch.source import sample_file

UNFINISHED = "\ufffd"  # a decoder's output for an incomplete character
RL_STEPS = 50  # number of RL steps per run whose episodes are saved, unless configured otherwise


@dataclass
class EpisodeSamples:
    """The episodes of the current RL step that will be saved, if any.

    The `group_size` episodes of a group are adjacent in the list over all ranks.
    """

    args: EPOConfig
    tokenizer: Any
    ranks: Comm
    group_size: int
    _rl_step: int | None = field(default=None, init=False)  # from 0, equal on all ranks; `None` if nothing is saved
    _samples: dict[int, Sample] = field(default_factory=dict, init=False)  # by index among this rank's episodes

    def begin(self, episodes: Sequence[Episode], rl_step: int, total_rl_steps: int) -> None:
        """Selects episodes of an RL step. Collective."""
        self._rl_step, self._samples = None, {}
        every = self.args.keep_episodes_steps or -(-total_rl_steps // RL_STEPS)
        if not self.args.keep_episodes or (rl_step % every and rl_step != total_rl_steps - 1):
            return
        rewards = self.ranks.gather([(e.total_reward, replace(e, left_out=False).is_usable) for e in episodes])
        outcomes = [Outcome(reward, usable, i // self.group_size) for i, (reward, usable) in enumerate(rewards)]
        draw = random.Random(f"{self.args.seed}/{rl_step}")
        first = self.ranks.index * len(episodes)
        for i, why in choose(outcomes, self.args.keep_episodes, draw).items():
            if 0 <= i - first < len(episodes):
                about = {"rl_step": rl_step + 1, "why": why, "group": outcomes[i].group}
                episode = episodes[i - first]
                texts = [self._texts(turn) for turn in episode.turns]
                self._samples[i - first] = sample_of(episode, texts, **about)
        self._rl_step = rl_step

    def _texts(self, turn: Turn) -> TurnTexts:
        ids, whole = turn.prompt_ids, {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return TurnTexts(self.tokenizer.decode(ids, **whole), tuple(token_pieces(self.tokenizer, turn.response_ids)))

    def add_entropy(self, rows: Sequence[int], sampled: Tensor, entropy: Tensor) -> None:
        """Adds the (b, T) entropies, in nats, of rows scored by the behaviour policy.

        `rows` are their indices among this rank's episodes; `sampled` (b, T) on the CPU is true on sampled tokens.
        """
        kept = {row: i for row, i in enumerate(rows) if i in self._samples}
        if not kept:
            return
        values = entropy.detach().cpu()  # one copy for all rows
        for row, i in kept.items():
            self._samples[i] = self._samples[i].with_entropy(values[row][sampled[row]].tolist())

    def end(self) -> None:
        """Writes the selected episodes. Collective."""
        if self._rl_step is None:
            return
        samples = self.ranks.gather([sample.to_dict() for sample in self._samples.values()])
        if self.ranks.index == 0:
            write_samples(sample_file(self.args.output_dir, self._rl_step + 1), samples)
        self._rl_step, self._samples = None, {}

    def state(self) -> dict[str, Any]:
        """Returns the state of this rank that is needed to resume within an RL step, in plain types."""
        samples = {str(i): json.dumps(sample.to_dict()) for i, sample in self._samples.items()}
        return {"rl_step": self._rl_step, "samples": samples}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores the state returned by `state`."""
        self._rl_step = state["rl_step"]
        self._samples = {int(i): Sample.from_dict(json.loads(sample)) for i, sample in state["samples"].items()}


def token_pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Returns the text of each token; joined, they are the decoded text including control tokens.

    A character that spans several tokens belongs to the last of them. The tokenizer decides how an incomplete character
    at the end is shown.
    """

    def decode(lists: list[Sequence[int]]) -> list[str]:
        return tokenizer.batch_decode(lists, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    if not ids:
        return []
    [whole] = decode([ids])
    pieces = decode([[token] for token in ids])
    if "".join(pieces) == whole:
        return pieces
    # Some decoders depend on the preceding tokens. A few tokens of context suffice.
    pieces, start, done = [], 0, 0
    for end in range(1, len(ids) + 1):
        before, now = decode([ids[start:done], ids[start:end]])
        finished = not now.endswith(UNFINISHED) or end == len(ids)
        pieces.append(now[len(before) :] if finished else "")
        if finished and len(now) > len(before):
            start, done = done, end
    return pieces
