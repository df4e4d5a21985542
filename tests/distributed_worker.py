"""One rank of `test_distributed.py`: `python distributed_worker.py RUN,RUN,... FOLDER`, with torch's variables.

A run is `{ddp,zero3,fsdp}-METHOD[-ARGUMENT]` and writes to the folder of that name. One launch serves many: most of
its time is imports.

`grpo`: step 1 trains on episodes made by hand, so that one process can do the same; steps 2 and 3 play. Rank 0's games
end after one turn, rank 1's after three, so rank 0 has to go on generating while it has nothing to play.

`guards-{sigterm,nonfinite}`: rank 1's loss is NaN in the second update; then rank 0 gets SIGTERM in the third, or rank
1's loss is NaN from the fourth on.

`nucleus-{tied,untied}`: two steps on episodes made by hand, with an entropy inside a reference's nucleus, and one
inside the policy's own.

`ppo-CRITIC`: steps 1 and 2 train on episodes made by hand, the third plays; `resume-CRITIC`: that one alone,
from its checkpoint. `end-CRITIC`: the whole run, when only the final save is left to do. CRITIC is a kind of critic, or
`adapters` for a policy and a separate critic with an adapter each.

`half-CRITIC`: one RL step of PPO in bfloat16 with weights that are loaded in parts, as by the 8-GPU recipes.

`dapo-ROUNDS`: three batches of three groups, the second on both ranks, of games whose outcome goes by the task;
`again-ROUNDS`: the rest of that run, from its checkpoint inside the second batch.

`ahead-WAY`: four RL steps with a server, one batch ahead (`batch`) or in turn with the weights before (`behind`). An
environment of rank 1 fails. `ahead-again`: groups of equal outcomes are replaced, while the other rank may have no
episode to play. `ahead-dead`: rank 1's server dies in the first update.

`eye`: two steps of a model with a vision tower, with gradient checkpointing.

`table`: for each method of `TABLE` two updates on episodes made by hand, one group over both ranks.
"""

import gc
import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
import torch.distributed as dist
import yaml
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from local_server import make_served
from method_table import CASES, config_of
from method_table import PPO as WITH_CRITIC
from model_families import family_of, make_family_trainer, save_checkpoint
from peft import LoraConfig
from ppo_kit import STATES
from run_kit import SendSignals
from trainer_kit import (
    GROUP,
    ROWS,
    make_episodes,
    make_model,
    make_ppo,
    make_trainer,
    results_of,
    saved,
    settle_by_task,
    with_episodes,
)
from transformers import TrainerCallback

from epo_trl.envs.toy import ToySuite, TreasureHunt
from epo_trl.runs.guards import NonFiniteError, TooManyAborted
from epo_trl.trainers import EPOTrainer
from epo_trl.types import StopReason

WORLD = 2
BACKEND = "gloo"  # tests/device has another
SETTINGS: dict[str, Any] = {  # one group, spread over the ranks
    "num_generations": ROWS, "optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "epo_lambda": 0.3,
    "smoothing_alpha": 0.7, "kappa_high": 1.0, "eval_episodes": 5, "per_device_eval_batch_size": 2,
}  # fmt: skip
CUT = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
GUARDED: dict[str, Any] = {**SETTINGS, "learning_rate": 0.1, "max_steps": 6, "max_skipped_updates": 2}
PPO: dict[str, Any] = {  # larger steps of the critic make float errors grow
    **SETTINGS, "num_generations": 1, "learning_rate": 0.1, "critic_learning_rate": 0.3, "value_coef": 0.01,
    "gamma": 0.9, "gae_lambda": 0.8, "max_steps": 3,
}  # fmt: skip
NUCLEUS: dict[str, Any] = {
    **SETTINGS,
    "learning_rate": 0.3,
    "max_steps": 2,
    "entropy_method": ["ref-nucleus", "siren"],
    "method_kwargs": {"ref-nucleus": {"weight": 1.0}, "siren": {"weight": 1.0, "anchor": 0.0}},
}
# Compared elsewhere: PPO, DAPO and the choice of groups in runs apart, variants of EPO by `epo`, and GSPO, whose first
# ratio is 1, by `grpo`; the second line in test_method_table.py, the third in test_method_group_credits.py.
ELSEWHERE = {"turn", "token", "outcome", "dapo", "variance-filter", "epo-base", "epo-decay", "epo-constant-beta"}
ELSEWHERE |= {"epo-v2", "gspo", "ea", "empg", "clip-b", "high-entropy", "steer", "entrocraft", "turn-mean"}
ELSEWHERE |= {"hgpo", "gagpo", "graph-gpo", "rloo"}
TABLE = [name for name in CASES if name not in ELSEWHERE]
ZERO3 = {
    "zero_optimization": {
        "stage": 3,
        # nothing may stay gathered: that would hide ranks that disagree
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "zero_allow_untested_optimizer": True,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
# Where accelerate was launched with a config of its own, that is what holds.
DEEPSPEED = {"ddp": None, "fsdp": None, "zero3": None if "ACCELERATE_USE_DEEPSPEED" in os.environ else ZERO3}


class KeepWeights(TrainerCallback):
    """Keeps the weights after an optimizer step. Collective under ZeRO-3."""

    def __init__(self, step: int = 1) -> None:
        self.step = step
        self.weights: dict[str, torch.Tensor] = {}

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == self.step:
            self.weights = gathered(model)


def gathered(model: Any) -> dict[str, torch.Tensor]:
    named = {name.removeprefix("module."): p for name, p in model.named_parameters()}
    if any("ds_id" in vars(p) for p in named.values()):
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(named.values())):
            return {name: p.detach().cpu().clone() for name, p in named.items()}
    return {name: getattr(p, "full_tensor", lambda p=p: p)().detach().cpu().clone() for name, p in named.items()}


class OneFaultySuite(ToySuite):
    """The last environment of rank 1 fails in its second turn."""

    def __init__(self, rank: int) -> None:
        super().__init__(move_limit=1 if rank == 0 else 3)
        self.rank, self.made = rank, 0

    def make_env(self) -> TreasureHunt:
        self.made += 1
        env = super().make_env()
        if self.rank == 1 and self.made == 4:
            original = env.step

            def step(action):
                if env._state.moves == 1:
                    raise RuntimeError("the engine died")
                return original(action)

            env.step = step
        return env


def inject_first(trainer: EPOTrainer, episodes: list[Any]) -> None:
    """The first rollout gives these episodes, the later ones are played."""
    original, left = trainer.play, [episodes]
    trainer.play = lambda tasks, **kwargs: left.pop() if left else original(tasks, **kwargs)


def inject_ppo(trainer: Any, part: slice, rollouts: int) -> None:
    """The first rollouts give a part of these episodes and final states, the later ones are played."""
    play, final_states, left = trainer.play, trainer._final_states, list(range(rollouts))
    trainer.play = lambda tasks, **kwargs: make_episodes(left.pop(0))[part] if left else play(tasks, **kwargs)
    trainer._final_states = lambda episodes: (
        [list(state) for state in STATES[part]] if len(trainer.envs) < 2 else final_states(episodes)
    )


def start(with_deepspeed: bool, timeout_seconds: float = 60) -> int:
    """Returns the rank, after joining the others."""
    gc.freeze()  # as in conftest.py
    if with_deepspeed:
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or it is compiled for 38 s
    dist.init_process_group(BACKEND, timeout=timedelta(seconds=timeout_seconds))
    if with_deepspeed:
        deepspeed.init_distributed(BACKEND)  # joins that group: a reference is loaded in parts before the engine starts
    return dist.get_rank()


def leave(rank: int, folder: Path, weights: Any, result: Any) -> None:
    """Writes what the tests read."""
    torch.save(weights, folder / f"weights{rank}.pt")
    (folder / f"rank{rank}.json").write_text(json.dumps(result))


def shard_by_fsdp() -> None:
    """Sets accelerate up as its launcher does with the shipped config. It would shard over GPUs alone."""
    config = yaml.safe_load((Path(__file__).parents[1] / "accelerate_configs" / "fsdp2.yaml").read_text())
    os.environ |= {"ACCELERATE_USE_FSDP": "true"}
    os.environ |= {name.upper(): str(value) for name, value in config["fsdp_config"].items()}
    start_state = PartialState.__init__

    def as_on_gpus(self: PartialState, *args: Any, **kwargs: Any) -> None:
        start_state(self, *args, **kwargs)
        if "ACCELERATE_USE_FSDP" in os.environ and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = as_on_gpus  # type: ignore[method-assign]


def forget_the_mode() -> None:
    """Another mode may follow in the same processes."""
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]


def resume_ppo(rank: int, mode: str, folder: Path, critic: str) -> None:
    first = folder.with_name(f"{mode}-ppo-{critic}")
    train_ppo(rank, mode, folder, critic, run=first / "run", checkpoint=str(first / "run" / "checkpoint-2"))


def end_ppo(rank: int, mode: str, folder: Path, critic: str) -> None:
    first = folder.with_name(f"{mode}-ppo-{critic}")
    train_ppo(rank, mode, folder, critic, run=first / "run", checkpoint="end")


def with_critic(critic: str) -> dict[str, Any]:
    """Returns the settings of a kind of critic."""
    if critic != "adapters":
        return {"critic": critic}
    return {"critic_use_peft": True, "peft_config": LoraConfig(target_modules="all-linear")}


def train_ppo(
    rank: int, mode: str, folder: Path, critic: str, run: Path | None = None, checkpoint: str | None = None
) -> None:
    keep = KeepWeights(2)
    trainer = make_ppo(
        run or folder / "run",
        suite=OneFaultySuite(rank),
        **CUT,
        save_strategy="steps",
        save_steps=2,
        tokens_per_pass=40,  # the ranks have different numbers of passes
        recompute_passes=mode == "ddp",
        deepspeed=DEEPSPEED[mode],
        callbacks=[keep],
        **with_critic(critic),
        **{**PPO, **({"optim": "adamw_torch"} if mode == "fsdp" else {})},  # plain SGD has no state to be saved
    )
    share = ROWS // WORLD
    inject_ppo(trainer, slice(rank * share, (rank + 1) * share), rollouts=0 if checkpoint else 2)
    if checkpoint == "end":
        trainer.play = None
        trainer.train_to_end()
    else:
        trainer.train(resume_from_checkpoint=checkpoint)
    result = {"kind": str(trainer.accelerator.distributed_type), "log": trainer.state.log_history}
    leave(rank, folder, {"second": keep.weights, "last": gathered(trainer.model)}, result)


def train_half(rank: int, mode: str, folder: Path, critic: str) -> None:
    path = folder / "start"
    saved(make_model().to(torch.bfloat16), path)
    trainer = make_ppo(
        folder / "run",
        model=str(path),
        model_init_kwargs={"dtype": "bfloat16"},
        bf16=True,
        deepspeed={**ZERO3, "bf16": {"enabled": "auto"}},
        **CUT,
        **with_critic(critic),
        **{**PPO, "max_steps": 1},
    )
    assert any("ds_id" in vars(p) for p in trainer.model.parameters())
    share = ROWS // WORLD
    inject_ppo(trainer, slice(rank * share, (rank + 1) * share), rollouts=1)
    before = gathered(trainer.model)
    trainer.train()
    leave(rank, folder, {"before": before, "last": gathered(trainer.model)}, {})


def train_grpo(rank: int, mode: str, folder: Path) -> None:
    keep = KeepWeights()
    trainer = make_trainer(
        folder / "run",
        suite=OneFaultySuite(rank),
        **CUT,
        max_steps=3,
        save_strategy="steps",
        save_steps=3,
        tokens_per_pass=40,  # the ranks have different numbers of passes
        recompute_passes=mode == "ddp",
        deepspeed=DEEPSPEED[mode],
        callbacks=[keep],
        **SETTINGS,
    )
    assert trainer.accelerator.num_processes == WORLD, trainer.accelerator.state
    share = ROWS // WORLD
    inject_first(trainer, make_episodes()[rank * share : (rank + 1) * share])
    trainer.train()
    played = [[len(e.turns), str(e.stop)] for e in trainer.last_episodes]
    trainer.evaluate()
    result = {
        "kind": str(trainer.accelerator.distributed_type), "local_rank": os.environ["LOCAL_RANK"],
        "history": trainer.methods["epo"].history.state_dict(), "health": trainer.health.state_dict(),
        "rl_step": trainer.rl_step, "log": trainer.state.log_history, "played": played,
        "evaluated": {r.split: r.episodes for r in trainer.last_reports},
    }  # fmt: skip
    leave(rank, folder, {"first": keep.weights, "last": gathered(trainer.model)}, result)


def nucleus_model(head: str, folder: Path) -> Any:
    """Returns a model that a reference can be loaded beside, whose head is the embedding or its own."""
    model = make_model()
    if head == "untied":
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(0.9 * model.lm_head.weight.detach())
    return saved(model, folder)


def train_nucleus(rank: int, mode: str, folder: Path, head: str) -> None:
    keep = KeepWeights(2)
    trainer = make_trainer(
        folder / "run",
        model=nucleus_model(head, folder / "start"),
        **CUT,
        deepspeed=DEEPSPEED[mode],
        callbacks=[keep],
        **NUCLEUS,
    )
    share = ROWS // WORLD
    with_episodes(trainer, make_episodes()[rank * share : (rank + 1) * share]).train()
    leave(rank, folder, keep.weights, {"log": trainer.state.log_history})


class KeepAll(KeepWeights):
    """Keeps the weights after every optimizer step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.steps.append(gathered(model))


def train_guarded(rank: int, mode: str, folder: Path, end: str) -> None:
    keep = KeepAll()
    trainer = make_trainer(
        folder / "run",
        suite=OneFaultySuite(rank),
        **CUT,
        deepspeed=DEEPSPEED[mode],
        callbacks=[keep, *[SendSignals("on_step_begin", 2, signal.SIGTERM)] * (end == "sigterm" and rank == 0)],
        **GUARDED,
    )
    spoilt = {1} if end == "sigterm" else {1, 3, 4, 5}
    if rank == 1:
        original = trainer._compute_loss
        trainer._compute_loss = lambda *args: (
            original(*args) + (float("nan") if trainer.state.global_step in spoilt else 0.0)
        )
    error = ""
    try:
        trainer.train()
    except NonFiniteError as failure:
        error = str(failure)
    result = {"error": error, "preempted": trainer.preempted, "log": trainer.state.log_history}
    leave(rank, folder, keep.steps, result)


def train_dapo(rank: int, mode: str, folder: Path, rounds: str, checkpoint: str | None = None) -> None:
    trainer = make_trainer(
        folder / "run",
        policy_method="dapo", max_resamples=int(rounds), per_device_train_batch_size=3, gradient_accumulation_steps=1,
        steps_per_generation=2, max_steps=6, save_strategy="steps", save_steps=3, deepspeed=DEEPSPEED[mode],
        trust_checkpoint=True,
    )  # fmt: skip
    play, batches = trainer.play, results_of(trainer, "_collect")
    trainer.play = lambda tasks, **kwargs: settle_by_task(play(tasks, **kwargs))
    trainer.train(resume_from_checkpoint=checkpoint)
    trained = [[(episode.task_id, episode.won) for episode in batch.episodes] for batch in batches]
    leave(rank, folder, {"last": gathered(trainer.model)}, {"trained": trained, "log": trainer.state.log_history})


def resume_dapo(rank: int, mode: str, folder: Path, rounds: str) -> None:
    checkpoint = folder.with_name(f"{mode}-dapo-{rounds}") / "run" / "checkpoint-3"
    train_dapo(rank, mode, folder, rounds, str(checkpoint))


class KillServer(TrainerCallback):
    server: Any = None

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.server.dead = True


def train_ahead(rank: int, mode: str, folder: Path, way: str) -> None:
    kill, lag = KillServer(), {"behind": 1} if way == "behind" else {"rollout_ahead": True}
    trainer, kill.server = make_served(
        folder / "run",
        suite=OneFaultySuite(rank),
        per_device_train_batch_size=GROUP,
        max_steps=4,
        policy_method="dapo" if way == "again" else [],
        max_resamples=3,
        max_aborted_share=0.25,
        callbacks=[kill] * (way == "dead" and rank == 1),
        **lag,
    )
    play, played = trainer.play, []

    def play_and_settle(tasks, **kwargs):
        episodes = play(tasks, **kwargs)
        played.append(len(episodes))
        return [
            one if one.stop is StopReason.ABORTED else settle_by_task([one] * 2)[i % 2]
            for i, one in enumerate(episodes)
        ]

    trainer.play, error = play_and_settle, ""
    try:
        trainer.train()
        trainer.evaluate()
    except TooManyAborted as failure:
        error = str(failure)
    torch.save({"last": gathered(trainer.model)}, folder / f"weights{rank}.pt")
    playing = bool(trainer.ahead and trainer.ahead.is_playing)
    result = {"error": error, "sizes": played, "playing": playing, "log": trainer.state.log_history}
    (folder / f"rank{rank}.json").write_text(json.dumps(result))


def weights_with(name: str, folder: Path, part: slice, **changes: Any) -> dict[str, torch.Tensor]:
    """Returns what two updates with a method of the table lead to; `part` of the episodes is this rank's."""
    case, make, own = CASES[name], make_trainer, {"num_generations": ROWS}
    if name in WITH_CRITIC:
        make, own = make_ppo, {"bootstrap_truncated": False, "value_coef": 0.01}
    trainer = make(
        folder / name, max_steps=2, optim="sgd", learning_rate=0.1, lr_scheduler_type="constant",
        **own, **changes, **config_of(name, case.settings, case.fields),
    )  # fmt: skip
    with_episodes(trainer, make_episodes()[part]).train()
    return gathered(trainer.model)


def train_table(rank: int, mode: str, folder: Path) -> None:
    share = ROWS // WORLD
    part, passes = slice(rank * share, (rank + 1) * share), {"deepspeed": DEEPSPEED[mode]}
    weights = {}
    for name in TABLE:
        weights[name] = weights_with(name, folder, part, per_device_train_batch_size=share, **passes)
        forget_the_mode()
    leave(rank, folder, weights, {})


def train_eye(rank: int, mode: str, folder: Path) -> None:
    start = folder / "start"
    if rank == 0:
        save_checkpoint(family_of("gemma3"), start)
    dist.barrier()
    trainer = make_family_trainer(
        str(start), folder, max_steps=2, per_device_train_batch_size=GROUP, gradient_checkpointing=True,
        deepspeed=DEEPSPEED[mode],
    )  # fmt: skip
    before = gathered(trainer.model)
    trainer.train()
    leave(rank, folder, {"before": before, "after": gathered(trainer.model)}, {})


METHODS: dict[str, Any] = {
    "table": train_table,
    "eye": train_eye,
    "grpo": train_grpo,
    "guards": train_guarded,
    "nucleus": train_nucleus,
    "ppo": train_ppo,
    "resume": resume_ppo,
    "end": end_ppo,
    "half": train_half,
    "dapo": train_dapo,
    "again": resume_dapo,
    "ahead": train_ahead,
}


def main() -> None:
    runs, folder = sys.argv[1:]
    rank = start("zero" in runs)
    for run in runs.split(","):
        print(f"=== {run}", flush=True)
        mode, method, *arguments = run.split("-")
        own = Path(folder) / run
        own.mkdir(exist_ok=True)
        if mode == "fsdp":
            shard_by_fsdp()
        METHODS[method](rank, mode, own, *arguments)
        dist.barrier()
        forget_the_mode()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # some runs abort while the interpreter goes down, after all is done


if __name__ == "__main__":
    main()
