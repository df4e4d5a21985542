"""The start of a vLLM in the process."""

from types import SimpleNamespace

import pytest
from trainer_kit import make_trainer

from epo_trl.models.vllm_start import starting_vllm


@pytest.mark.parametrize(("mode", "says"), [("colocate", True), ("server", False)])
def test_the_start_of_a_vllm_in_the_process_is_announced_and_timed(tmp_path, monkeypatch, capsys, mode, says):
    before = []

    def build(**_):
        before.append(capsys.readouterr().err)
        info = SimpleNamespace(get_server_info=lambda: {"model_config": {"logprobs_mode": "processed_logprobs"}})
        return SimpleNamespace(structured_outputs_regex="none", generation_kwargs={}, vllm_client=info)

    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", build)
    make_trainer(tmp_path, use_vllm=True, vllm_mode=mode)
    assert ("starting vLLM in the process" in before[0], "vLLM is ready after" in capsys.readouterr().err) == (
        says, says,
    )  # fmt: skip


def test_ranks_after_the_first_are_quiet(capsys):
    with starting_vllm(quiet=True):
        pass
    assert capsys.readouterr().err == ""
