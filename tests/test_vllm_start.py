"""The start of a vLLM in the process."""

import os
import socket
from pathlib import Path
from types import SimpleNamespace

import forked
import pytest
from trainer_kit import make_trainer
from trl.import_utils import is_vllm_available

from epo_trl.errors import InputError
from epo_trl.models.vllm import own_port


@pytest.mark.parametrize(("mode", "says"), [("colocate", True), ("server", False)])
def test_the_start_of_a_vllm_in_the_process_has_a_port_and_is_announced(tmp_path, monkeypatch, capsys, mode, says):
    before = []
    monkeypatch.setenv("MASTER_PORT", "")

    def build(**_):
        before.append((capsys.readouterr().err, os.environ["MASTER_PORT"]))
        info = SimpleNamespace(get_server_info=lambda: {"model_config": {"logprobs_mode": "processed_logprobs"}})
        return SimpleNamespace(structured_outputs_regex="none", generation_kwargs={}, vllm_client=info)

    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", build)
    make_trainer(tmp_path, use_vllm=True, vllm_mode=mode)
    [(text, port)] = before
    assert ("starting vLLM in the process" in text) is ("vLLM is ready after" in capsys.readouterr().err) is says
    assert port.isdecimal() is says


def test_two_runs_that_start_together_have_ports_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "")
    script = Path(__file__).with_name("port_worker.py")
    logs = [tmp_path / "log 1", tmp_path / "log 2"]
    runs = [forked.start([script, tmp_path, log.name[-1]], cwd=tmp_path, log=log) for log in logs]
    try:
        codes = [run.wait(60) for run in runs]
    finally:
        for run in runs:
            run.kill()
    assert codes == [0, 0], "".join(log.read_text() for log in logs)


def test_the_port_is_kept_from_others_until_vllm_listens_and_that_of_a_launcher_stays(monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "")
    with own_port(), socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
    monkeypatch.setenv("MASTER_PORT", "12345")
    with own_port():
        assert os.environ["MASTER_PORT"] == "12345"


@pytest.mark.skipif(is_vllm_available(), reason="vLLM is installed")
def test_without_vllm_the_error_names_the_extra(tmp_path):
    with pytest.raises(InputError, match=r"use_vllm: expected vLLM, got .*epo-trl\[vllm\]"):
        make_trainer(tmp_path, use_vllm=True)
