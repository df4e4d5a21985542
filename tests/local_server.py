"""A vLLM server in this process, as `VllmServerEngine` sees it: a copy of the policy that samples with seeds."""

import random
import threading
import time
from collections import deque
from dataclasses import replace

import torch
from trainer_kit import make_trainer

from epo_trl.trainers.ahead import RolloutAhead
from epo_trl.trainers.engines import VllmServerEngine


class LocalServer:
    """Stands in for TRL's `VLLMGeneration` and `VLLMClient`.

    Its seeds are those of the requests, or without any those of the prompts.

    Args:
        trainer: The trainer.
        behind: Number of RL steps that the weights which sample are behind those that came last.

    Attributes:
        sent: RL steps at whose start weights came.
        seconds: Time that it takes for an answer.
    """

    base_url = "http://in.this.process"
    structured_outputs_regex = min_p = None
    repetition_penalty, top_p, top_k, logprobs = 1.0, 1.0, 0, 0

    def __init__(self, trainer, behind=0):
        # No copy of the trainer's model: TRL has replaced its forward by one that refers to the trained weights.
        self.trainer, self.model = trainer, type(trainer.model)(trainer.model.config).eval()
        self.temperature, self.max_completion_length = trainer.args.temperature, trainer.args.max_completion_length
        self.generation_kwargs = {}
        self.came = deque(maxlen=behind + 1)
        self.sent, self.seconds, self.asked, self.dead = [], 0.0, 0, False
        self._lock, self._alone = threading.Lock(), threading.Lock()

    def sync_weights(self):
        if self.dead and self.trainer.accelerator.is_main_process:
            raise ConnectionError("no weights were sent")
        assert threading.current_thread() is threading.main_thread() and not self.asked
        assert not (self.trainer.ahead and self.trainer.ahead.is_playing), "only between rollouts"
        self.came.append({name: weight.clone() for name, weight in self.trainer.model.state_dict().items()})
        self.model.load_state_dict(self.came[0], strict=False)  # without a critic
        self.sent.append(self.trainer.rl_step)

    def generate(self, prompts, n, *, temperature, max_tokens, generation_kwargs, **settings):
        if self.dead:
            raise ConnectionError("refused")
        with self._lock:
            self.asked += 1
        try:
            time.sleep(self.seconds)
            seed = generation_kwargs.get("seed", random.Random(repr(prompts)).randrange(2**62))
            with self._alone:  # transformers' forward is not made for several threads
                ids, logps = self._sample(
                    list(prompts[0]), temperature, max_tokens, torch.Generator().manual_seed(seed)
                )
            return {"completion_ids": [ids], "logprobs": [[[logp] for logp in logps]]}
        finally:
            with self._lock:
                self.asked -= 1

    @torch.no_grad()
    def _sample(self, prompt, temperature, most, draw):
        ids, logps = [], []
        while len(ids) < most and (not ids or ids[-1] not in self.trainer.eos_token_ids):
            logits = self.model(input_ids=torch.tensor([prompt + ids])).logits[0, -1].float() / temperature
            token = torch.multinomial(logits.softmax(-1), 1, generator=draw).item()
            ids.append(token)
            logps.append(logits.log_softmax(-1)[token].item())
        return ids, logps


def make_served(folder, *, make=make_trainer, rollout_ahead=False, behind=0, request_seeds=True, **changes):
    """Returns a trainer whose engine asks a server in this process, and that server."""
    trainer = make(folder, **changes)
    trainer.use_vllm, trainer.vllm_mode, trainer._last_loaded_step = True, "server", -1
    trainer.vllm_generation = server = LocalServer(trainer, behind)
    trainer.engine = engine = VllmServerEngine(trainer)
    trainer.evaluator = replace(trainer.evaluator, engine=engine)
    engine._client = server
    trainer.args.rollout_ahead, trainer.args.request_seeds = rollout_ahead, request_seeds
    trainer.ahead = RolloutAhead(trainer) if rollout_ahead else None
    return trainer, server
