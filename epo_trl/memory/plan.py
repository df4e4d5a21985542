"""Plans a run before it starts: tokens, seconds, GPU-hours and memory, each with its source (docs/memory.md)."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from epo_trl.memory.batch import (
    Batch,
    Settings,
    batch_of,
    count_evaluations,
    count_passes,
    has_critic,
    has_reference,
    whole,
)
from epo_trl.memory.inputs import Assumed, Machines
from epo_trl.memory.rates import Rates
from epo_trl.memory.sizes import GB, ModelShape, Run, host_bytes, memory_per_gpu
from epo_trl.memory.speed import Turn, forward_flops, reading_flops, sampling_speed

LISTS = 2  # most suites have two test lists: iid and ood


@dataclass(frozen=True)
class Row:
    """One line of a plan.

    Args:
        part: Heading of the section.
        name: Name of the quantity.
        value: Its value.
        unit: Unit of the value; `""` for a count.
        because: Source of the value.
    """

    part: str
    name: str
    value: float
    unit: str
    because: str


@dataclass(frozen=True)
class Plan:
    """The estimated cost of a run.

    Args:
        title: Model and hardware.
        rows: Rows in display order.
        fits: Whether the run fits into GPU memory.
        left_out: Sentences about costs that the numbers do not cover.
    """

    title: str
    rows: tuple[Row, ...]
    fits: bool
    left_out: tuple[str, ...]

    def value(self, part: str, name: str) -> float:
        """Returns the value of a row."""
        return next(row.value for row in self.rows if (row.part, row.name) == (part, name))


def make_plan(
    settings: Settings,
    changed: Collection[str],
    shape: ModelShape,
    machines: Machines,
    assumed: Assumed | None = None,
    rates: Rates | None = None,
) -> Plan:
    """Estimates the cost of a run.

    Args:
        settings: Fields of `EPOConfig` or `EPOPPOConfig` and `ModelConfig`, as in a YAML file, defaults included.
        changed: Names of the settings that differ from their defaults.
        shape: Sizes of the policy.
        machines: Hardware of the run.
        assumed: Assumptions for quantities that the config does not set.
        rates: Measurements of another run, used in place of assumptions.

    Raises:
        ValueError: If a setting is missing or invalid. The message names the field.
    """
    assumed = assumed or Assumed()
    _check_server(settings, machines)
    batch = batch_of(settings, machines.gpus, assumed.rl_steps)
    turn, turn_rows = _turn(settings, changed, assumed, rates)
    rows = [
        Row("batch", "episodes of an RL step", batch.episodes, "", batch.why),
        Row("batch", "tasks of an RL step", batch.tasks, "", f"/ num_generations {settings['num_generations']}"),
        Row("batch", "optimizer steps of an RL step", batch.updates, "", "steps_per_generation x num_iterations / "
            "gradient_accumulation_steps"),
        Row("batch", "RL steps", batch.rl_steps, "", batch.why_rl_steps),
        *turn_rows,
    ]  # fmt: skip
    turns = batch.episodes * turn.turns
    rows += [
        Row("tokens", "sampled in an RL step", turns * turn.response, "", "episodes x turns x response"),
        Row("tokens", "read in an RL step", turns * turn.prompt, "", "episodes x turns x prompt"),
        Row("tokens", "of the run", turns * (turn.response + turn.prompt) * batch.rl_steps, "", "both x RL steps"),
    ]
    if rates is None:
        seconds = _computed_seconds(settings, shape, machines, assumed, batch, turn)
    else:
        seconds = _measured_seconds(rates, turns / machines.gpus)
    rows += seconds
    *parts, update = (row.value for row in seconds)
    rows += _run_rows(settings, machines, assumed, batch, sum(parts), update)
    memory, fits = _memory(settings, changed, shape, machines, batch, turn)
    server = f" and {machines.server_gpus} of a server" if machines.server_gpus else ""
    title = f"{shape.name}, {machines.gpus} x {machines.gpu.name}{server}"
    return Plan(title, (*rows, *memory), fits, _left_out(settings, rates, assumed))


def _check_server(settings: Settings, machines: Machines) -> None:
    server = settings.get("use_vllm") and settings.get("vllm_mode") == "server"
    if bool(server) != bool(machines.server_gpus):
        if server:
            raise ValueError(
                f"server_gpus: expected the number of GPUs of the vLLM server (vllm_mode 'server'), got "
                f"{machines.server_gpus}"
            )
        raise ValueError(
            f"server_gpus: expected 0 without a vLLM server, got {machines.server_gpus} with "
            f"vllm_mode {settings.get('vllm_mode')!r}; set use_vllm: true and vllm_mode: server in the config"
        )


def _turn(
    settings: Settings, changed: Collection[str], assumed: Assumed, rates: Rates | None
) -> tuple[Turn, list[Row]]:
    """Returns the mean turn of the run, and the rows that show the source of its numbers."""
    concatenated = settings.get("context") == "concatenated"
    fields = {
        "turns": ("turns of an episode", "max_turns"),
        "prompt_tokens": ("prompt of a turn", "max_prompt_length"),
        "response_tokens": ("response of a turn", "max_completion_length"),
    }
    found, rows = {}, []
    for name, (title, limit) in fields.items():
        given, measured = getattr(assumed, name), getattr(rates, name, None)
        if given is not None:
            value, why = given, "as given"
        elif measured is not None and rates is not None:
            value, why = measured, f"measured: {rates.source}"
        elif concatenated and name == "prompt_tokens":
            raise ValueError(
                "prompt_tokens: expected the mean number of prompt tokens that a turn adds, got nothing; with context "
                "'concatenated' the config limits only the whole sequence, so pass prompt_tokens"
            )
        else:
            value = whole(settings, limit)
            why = f"at most: {limit}{'' if limit in changed else ' (default)'}"
        found[name] = float(value)
        rows.append(Row("a turn", title, value, "" if name == "turns" else "tokens", why))
    return Turn(found["turns"], found["prompt_tokens"], found["response_tokens"], concatenated), rows


def _computed_seconds(
    settings: Settings, shape: ModelShape, machines: Machines, assumed: Assumed, batch: Batch, turn: Turn
) -> list[Row]:
    """Estimates the seconds of an RL step from the GPU's data sheet; the update comes last."""
    gpu, generating = machines.gpu, machines.server_gpus or machines.gpus
    peak = f"{assumed.mfu:.0%} of {gpu.tflops:g} TFLOPs (assumed), {{}} GPUs"
    flops_per_second = gpu.tflops * 1e12 * assumed.mfu
    speed, why = assumed.tokens_per_second, "as given"
    if speed is None:
        if not settings.get("use_vllm"):
            raise ValueError(
                "tokens_per_second: expected a number > 0, got nothing; with use_vllm false it cannot be derived from "
                "the GPU"
            )
        together = batch.episodes / (1 if machines.server_gpus else machines.gpus)
        engines = machines.server_gpus or 1
        speed = sampling_speed(shape, turn, together, gpu.bandwidth_gb_s * GB * assumed.bandwidth_share, engines)
        why = (
            f"by {assumed.bandwidth_share:.0%} of {gpu.bandwidth_gb_s:g} GB/s (assumed), {together:g} episodes "
            f"{'on the server' if machines.server_gpus else 'on each'}"
        )
    passes = count_passes(settings, batch.rounds)
    policy, critic = forward_flops(shape, turn, batch.episodes), forward_flops(shape, turn, batch.episodes, head=False)
    update = (passes.policy * policy + passes.critic * critic) / (flops_per_second * machines.gpus)
    reading = reading_flops(shape, turn, batch.episodes) / (flops_per_second * generating)
    sampling = batch.episodes * turn.turns * turn.response / (speed * generating)
    workers = max(1, int(settings.get("env_workers") or 0))
    env = batch.episodes * turn.turns * assumed.env_seconds / (machines.gpus * workers)
    among = "" if workers == 1 else f", {workers} env_workers"
    part = "seconds of an RL step"
    return [
        Row(part, "reading prompts", reading, "s", f"{peak.format(generating)}; nothing is cached"),
        Row(part, "sampling", sampling, "s", f"{speed:,.0f} tokens/s on each of {generating} GPUs: {why}"),
        Row(part, "environments", env, "s", f"{assumed.env_seconds:g} s a turn (assumed), one after another on each "
            f"of {machines.gpus} processes{among}"),
        Row(part, "update", update, "s", f"{peak.format(machines.gpus)}: {passes.why}"),
    ]  # fmt: skip


def _measured_seconds(rates: Rates, turns: float) -> list[Row]:
    """Computes the seconds of an RL step from another run's measured seconds per turn and process."""
    parts = {"generation": rates.generate_seconds, "environments": rates.env_seconds, "update": rates.update_seconds}
    why = "{:.4g} s a turn of one process, measured"
    return [
        Row("seconds of an RL step", name, seconds * turns, "s", why.format(seconds)) for name, seconds in parts.items()
    ]


def _run_rows(
    settings: Settings, machines: Machines, assumed: Assumed, batch: Batch, rollout: float, update: float
) -> list[Row]:
    evaluations, episodes = count_evaluations(settings, batch.rl_steps, batch.updates), assumed.eval_episodes
    if episodes is None and settings.get("eval_episodes"):
        episodes = LISTS * whole(settings, "eval_episodes")
    evaluating = evaluations * (episodes or 0) / batch.episodes * rollout
    counted = (
        f"{evaluations} x {episodes} episodes at the speed of the rollout"
        if episodes
        else f"left out: {evaluations}, and the number of episodes is unknown; set eval_episodes"
    )
    training, gpus = (rollout + update) * batch.rl_steps, machines.gpus + machines.server_gpus
    return [
        Row("seconds of an RL step", "all", rollout + update, "s", "their sum: they do not overlap"),
        Row("run", "training", training / 3600, "h", "RL steps x that"),
        Row("run", "evaluations", evaluating / 3600, "h", counted if evaluations else "the config has none"),
        Row("run", "all", (training + evaluating) / 3600, "h", "their sum"),
        Row("run", "GPU-hours", (training + evaluating) / 3600 * gpus, "GPU-h", f"x {gpus} GPUs"),
    ]


def _memory(
    settings: Settings, changed: Collection[str], shape: ModelShape, machines: Machines, batch: Batch, turn: Turn
) -> tuple[list[Row], bool]:
    """Returns the memory rows of one training GPU, and whether they fit."""
    most = whole(settings, "max_turns")
    lora = whole(settings, "lora_r") if settings.get("use_peft") else 0
    run = Run(
        gpus=machines.gpus, zero_stage=machines.zero_stage, offload=machines.offload,
        batch_tokens=math.ceil(batch.per_gpu * most * (turn.prompt + turn.response)),
        reference=has_reference(settings), critic=has_critic(settings),
        gradient_checkpointing=bool(settings.get("gradient_checkpointing")), lora_rank=lora,
        critic_lora=bool(settings.get("critic_use_peft")),
    )  # fmt: skip
    parts = memory_per_gpu(shape, run)
    total = parts.pop("total")
    why = {
        "weights": f"ZeRO stage {run.zero_stage}" + (f", LoRA of rank {lora} on all linear layers" if lora else ""),
        "activations": f"{run.batch_tokens:,} tokens: {batch.per_gpu} x max_turns {most} x a turn as above",
        "reference": "not needed, or no separate copy on the GPU" if not parts["reference"] else "",
    }
    rows = [Row("memory of a GPU", name, size / GB, "GB", why.get(name, "")) for name, size in parts.items()]
    if settings.get("use_vllm") and not machines.server_gpus and not settings.get("vllm_enable_sleep_mode"):
        share = float(settings["vllm_gpu_memory_utilization"])
        own = share * machines.gpu.gpu_gb
        total += own * GB
        field = "vllm_gpu_memory_utilization" + ("" if "vllm_gpu_memory_utilization" in changed else " (default)")
        rows.append(
            Row("memory of a GPU", "vLLM beside it", own, "GB", f"{field} {share:g} x {machines.gpu.gpu_gb:g} GB")
        )
    fits = total <= machines.gpu.gpu_gb * GB
    verdict = f"{'fits' if fits else 'DOES NOT FIT'} on {machines.gpu.gpu_gb:g} GB"
    rows.append(Row("memory of a GPU", "all", total / GB, "GB", verdict))
    if run.offload:
        rows.append(Row("memory of a GPU", "(of the machine)", host_bytes(shape, run) / GB, "GB", "all GPUs together"))
    return rows, fits


def _left_out(settings: Settings, rates: Rates | None, assumed: Assumed) -> tuple[str, ...]:
    """Lists costs and savings that the numbers do not cover."""
    lines = ["loading, checkpoints, sending weights to vLLM, restarts"]
    if rates is not None:
        lines.append(f"measured with {rates.about}: the plan holds for that model, GPU and turn length")
        return tuple(lines)
    lines.append("waiting for the longest episode, padding, communication: they lower the assumed shares")
    if assumed.turns is None or assumed.prompt_tokens is None or assumed.response_tokens is None:
        lines.append("turns and tokens marked 'at most' are limits: a run stays below them, often far below")
    if settings.get("policy_method"):
        lines.append("groups that a method replays")
    return tuple(lines)
