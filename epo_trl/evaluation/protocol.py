"""Named, fixed settings of an evaluation. A success rate is meaningless without them, so every report has one."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

from epo_trl.bounds import Count, CountOrZero, NonNegative, OneOf, check_bounds
from epo_trl.errors import InputError, changed_settings
from epo_trl.rollout.context import CONTEXTS
from epo_trl.rollout.spec import INVALID_ACTIONS, SUCCESS_RULES


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """The settings under which a success rate is measured."""

    name: str  # shown with every result
    max_turns: Count  # an episode that reaches it without success is a failure
    history_length: CountOrZero  # past turns in a windowed prompt
    temperature: NonNegative  # of sampling; 0.0 is greedy decoding
    success_rule: Annotated[str, OneOf(SUCCESS_RULES)] = "won"
    invalid_action: Annotated[str, OneOf(INVALID_ACTIONS)] = "pass"  # to the engine, or "skip"
    context: Annotated[str, OneOf(CONTEXTS)] = "windowed"
    env_options: dict[str, Any] = field(default_factory=dict)  # of every `reset`, where they affect the result
    few_shot: str = ""  # label of the example episodes before the first prompt, see `FewShot.label`
    prompt_template: str = ""  # the template that the protocol prescribes; "" leaves it to the config
    description: str = field(default="", compare=False)  # purpose, and comparable results; not part of the settings

    def __post_init__(self) -> None:
        check_bounds(self)

    @property
    def is_windowed(self) -> bool:
        """Whether every turn has its own prompt; otherwise the episode is one growing sequence."""
        return self.context == "windowed"

    def varied(self, **given: Any) -> Protocol:
        """Returns a variant with another turn limit, temperature, context or examples, and a name that shows it.

        `alfworld50` with 30 turns is `alfworld50+max_turns=30`. Arguments that are `None` or equal the current value
        are ignored, so the plain name always means the plain settings.
        """
        changed = {key: value for key, value in given.items() if value not in (None, getattr(self, key))}
        if not changed:
            return self
        marks = "".join(
            f"+{key}={value if isinstance(value, str) else format(value, 'g')}" for key, value in changed.items()
        )
        plain = self.name.partition("+")[0]
        return replace(self, **changed, name=self.name + marks, description=f"{plain} but for what the name says.")

    def rules(self) -> dict[str, Any]:
        """Returns what two protocols are compared by, as JSON values: the fields, with an empty description."""
        return asdict(self) | {"description": ""}


_ALFWORLD = Protocol(
    name="alfworld50",
    max_turns=50,
    history_length=2,
    temperature=0.4,
    description="ALFWorld, whole fixed test lists (140 valid_seen, 134 valid_unseen), 50 turns. The EPO release has "
    "the same turns, history and temperature, but plays 16 random games of a split.",
)
_ALFWORLD_PLAIN = replace(
    _ALFWORLD,
    name="alfworld-plain50",
    history_length=0,
    temperature=0.0,
    context="concatenated",
    prompt_template="plain",
    description="The real ALFWorld games without help: the prompt has the task and the observations, no notes and no "
    "admissible actions. The whole episode is the context. Whole fixed test lists (140 valid_seen, 134 valid_unseen), "
    "50 turns, greedy decoding, as in the evaluation of BUTLER.",
)
_SCIENCEWORLD = Protocol(
    name="strict30",
    max_turns=30,
    history_length=2,
    temperature=0.4,
    env_options={"simplification": "easy"},
    description="ScienceWorld, 30 turns of our own counting, the engine's limit far above; solved means a score of "
    "100. About half of the gold paths are longer than that, so 100 % cannot be reached.",
)
_SCIENCEWORLD_TINY = replace(
    _SCIENCEWORLD,
    name="scienceworld-tiny10",
    max_turns=10,
    history_length=8,
    temperature=1.0,
    description="ScienceWorld for a tiny model, 10 turns, sampled at the training temperature; strict success. Not "
    "comparable with any published ScienceWorld number.",
)
_WEBSHOP = Protocol(
    name="webshop-500",
    max_turns=15,
    history_length=2,
    temperature=0.4,
    description="WebShop, the 500 test goals, 15 turns; success is a reward of 1, and the score is 100 times the mean "
    "reward. The paper allows 100 steps.",
)
_VARIANTS = (
    replace(
        _ALFWORLD,
        name="alfworld20",
        max_turns=20,
        description="ALFWorld-style, generated games of small rooms for a small pretrained model: as alfworld50, with "
        "20 turns. Not comparable with any published ALFWorld number.",
    ),
    replace(
        _ALFWORLD,
        name="alfworld-tiny20",
        max_turns=20,
        temperature=1.0,
        description="ALFWorld-style, generated games for a tiny model, 20 turns, sampled at the training temperature: "
        "colder, so small a model walks in circles. Not comparable with any published ALFWorld number.",
    ),
    replace(
        _ALFWORLD,
        name="alfworld-tiny50",
        temperature=1.0,
        description="The real ALFWorld games for a tiny model, whole fixed test lists (140 valid_seen, 134 "
        "valid_unseen), 50 turns, sampled at the training temperature. The prompt holds notes that the environment "
        "keeps for the agent, so it is not comparable with any published ALFWorld number.",
    ),
    replace(
        _ALFWORLD_PLAIN,
        name="alfworld-plain50-list",
        prompt_template="plain_list",
        description="As alfworld-plain50, and every observation comes with the list of the admissible actions.",
    ),
    replace(_SCIENCEWORLD, name="strict100", max_turns=100, description="ScienceWorld as in strict30, with 100 turns."),
    replace(
        _SCIENCEWORLD,
        name="epo-released",
        success_rule="ended-with-score",
        env_options={**_SCIENCEWORLD.env_options, "engine_limit": 100},
        description="The success rule of the EPO release, for comparison with its numbers only: an episode that the "
        "engine ends at its move limit counts as solved if any score was made, so a script of `wait` wins.",
    ),
    replace(
        _SCIENCEWORLD,
        name="scienceworld-plain50",
        max_turns=50,
        history_length=0,
        temperature=0.0,
        context="concatenated",
        prompt_template="plain",
        description="ScienceWorld without help: the prompt has the task and the observations. The whole episode is the "
        "context. 50 turns, greedy; solved means a score of 100.",
    ),
    replace(
        _SCIENCEWORLD_TINY,
        name="scienceworld-tiny20",
        max_turns=20,
        description="ScienceWorld as in scienceworld-tiny10, with 20 turns.",
    ),
    replace(
        _WEBSHOP,
        name="webshop-tiny10",
        max_turns=10,
        history_length=0,
        temperature=1.0,
        context="concatenated",
        description="A generated shop for a tiny model, 10 turns, the whole episode is the context, sampled at the "
        "training temperature. Not comparable with any published WebShop number.",
    ),
)
_PROTOCOLS = {
    one.name: one for one in (_ALFWORLD, _ALFWORLD_PLAIN, _SCIENCEWORLD, _SCIENCEWORLD_TINY, _WEBSHOP, *_VARIANTS)
}


def register_protocol(protocol: Protocol) -> Protocol:
    """Registers a protocol and returns it, or the equal one that already has this name.

    Raises:
        ValueError: If the name already belongs to other settings. The message lists the differences.
    """
    known = _PROTOCOLS.setdefault(protocol.name, protocol)
    if known != protocol:
        differ = "; ".join(changed_settings(known.rules(), protocol.rules()))
        raise InputError(
            f"protocol: expected the registered settings of {protocol.name!r}, got others ({differ}); use the "
            "registered ones or another name"
        )
    return known


def get_protocol(name: str) -> Protocol:
    """Looks up a protocol by name."""
    if name not in _PROTOCOLS:
        raise InputError(f"protocol: expected one of {', '.join(map(repr, protocol_names()))}, got {name!r}")
    return _PROTOCOLS[name]


def protocol_names() -> tuple[str, ...]:
    """Returns the names of all protocols in alphabetical order."""
    return tuple(sorted(_PROTOCOLS))
