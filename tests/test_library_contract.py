"""What we rely on in other libraries than TRL without their promise: when one moves, this file says what to do."""

import argparse
import inspect
import json
from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from accelerate.commands import launch
from foreign_names import ROOT, advice
from transformers import GenerationConfig, MambaForCausalLM, PreTrainedModel, Trainer, TrainingArguments
from transformers.models.mixtral import modeling_mixtral

from epo_trl.models import build_model, build_tokenizer


def expect(name: str, expected: object, get: Callable[[], Any]) -> None:
    """Checks that something of another library is as expected; what it raises counts as an answer."""
    try:
        got = get()
    except Exception as error:
        got = f"{type(error).__name__}: {error}"
    assert got == expected, advice(name, expected, got)


def expect_lines(name: str, source: str, *lines: str) -> None:
    """Checks that some source has lines."""
    for line in lines:
        assert line in source, advice(name, line, "no such line")


# --------------------------------------------------------------------------------------------------- transformers


def test_a_model_says_which_attention_it_has():
    model = build_model(build_tokenizer(["go to drawer 3"]), hidden_size=32, heads=2)
    for attention in ("sdpa", "eager"):
        model.set_attn_implementation(attention)
        expect("_attn_implementation", attention, lambda: model.config._attn_implementation)


def test_a_model_can_leave_weights_out_when_it_is_saved(tmp_path):
    model = build_model(build_tokenizer(["a"]), hidden_size=8, layers=1, heads=1)
    model._keys_to_ignore_on_save = {"model.norm.weight"}
    model.save_pretrained(tmp_path)
    saved = safetensors.torch.load_file(tmp_path / "model.safetensors").keys()
    expect("_keys_to_ignore_on_save", {"model.norm.weight"}, lambda: dict(model.named_parameters()).keys() - saved)


def test_a_model_says_whether_it_has_states_of_its_own():
    expect("_is_stateful", (False, True), lambda: (PreTrainedModel._is_stateful, MambaForCausalLM._is_stateful))


def test_settings_of_generation_say_whether_they_were_made_from_a_models():
    made = GenerationConfig.from_model_config(transformers.LlamaConfig())
    expect("_from_model_config", True, lambda: made.to_dict()["_from_model_config"])


def test_fields_that_may_be_json_are_a_list_of_names():
    expect("_VALID_DICT_FIELDS", True, lambda: "fsdp_config" in [*TrainingArguments._VALID_DICT_FIELDS])
    source = inspect.getsource(TrainingArguments.__post_init__)
    expect_lines("_VALID_DICT_FIELDS", source, "for valid_field in self._VALID_DICT_FIELDS:")


def test_the_model_of_a_checkpoint_is_saved_by_an_internal_call():
    source = inspect.getsource(Trainer._save_checkpoint)
    expect_lines("_internal_call", source, "self.save_model(output_dir, _internal_call=True)")


def test_the_loss_of_a_router_takes_logits_experts_and_a_mask():
    expect(
        "load_balancing_loss_func",
        ["gate_logits", "num_experts", "top_k", "attention_mask"],
        lambda: [*inspect.signature(modeling_mixtral.load_balancing_loss_func).parameters],
    )


# --------------------------------------------------------------------------------------------- torch and DeepSpeed


def test_the_rate_that_a_scheduler_reports_can_be_set():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (step + 1))

    def reported() -> list[float]:
        scheduler.get_last_lr()[0] = 0.0
        return scheduler.get_last_lr()

    expect("get_last_lr", [0.0], reported)
    optimizer.step()
    scheduler.step()
    expect("get_last_lr", [0.5], scheduler.get_last_lr)  # the next step makes it anew


def test_weights_that_zero3_splits_know_their_size_and_number():
    zero = pytest.importorskip("deepspeed.runtime.zero.partition_parameters")
    source = inspect.getsource(zero.Init)
    expect_lines("ds_numel", source, "param.ds_numel = param.numel()")
    expect_lines("ds_id", source, "param.ds_id = Init.param_id")


# ------------------------------------------------------------------------------------------------------ accelerate


def test_one_process_is_started_by_one_function(monkeypatch):
    started = []
    monkeypatch.setattr(launch, "simple_launcher", started.append)
    config = ROOT / "accelerate_configs" / "single_gpu.yaml"
    words = launch.launch_command_parser().parse_args(["--config_file", str(config), "program.py"])
    expect("simple_launcher", None, lambda: launch.launch_command(words))
    expect("simple_launcher", ["program.py"], lambda: [args.training_script for args in started])


# -------------------------------------------------------------------------------------------------------- argparse


def test_a_parser_knows_its_options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--some_option")
    expect("_actions", ["help", "some_option"], lambda: [action.dest for action in parser._actions])


# ------------------------------------------------------------------------------------------------------- TextWorld


def test_a_grammar_of_textworld_holds_its_parsed_texts_as_rules():
    textgen = pytest.importorskip("textworld.envs.pddl.textgen")
    grammar = textgen.ContextSensitiveGrammar.parse(json.dumps({"said": [{"rhs": "You see {o.name}."}]}))

    expect("_rules", ["You see ", "o.name", "."], lambda: [str(symbol) for symbol in grammar._rules["said"][0].rhs])


def test_textworld_parses_every_text_by_one_function_and_keeps_its_grammar():
    textgen, pddl = (pytest.importorskip(f"textworld.envs.pddl.{name}") for name in ("textgen", "pddl"))
    source = inspect.getsource(textgen.ContextSensitiveGrammar)
    expect_lines(
        "_parse_and_convert",
        source,
        'rhs=_parse_and_convert(rule["rhs"], rule_name="symbols")',
        'derivation = _parse_and_convert(start, rule_name="symbols"',
    )
    expect_lines("_logic", inspect.getsource(pddl), "self._logic = ", "self._logic.grammar.derive(")


# ------------------------------------------------------------------------------------------------------------ py4j


def test_py4j_logs_a_lost_connection_by_the_module_logging():
    gateway = pytest.importorskip("py4j.java_gateway")
    expect_lines("logging", inspect.getsource(gateway.GatewayClient.send_command), "logging.exception(")


# --------------------------------------------------------------------------------------------------------- OpenEnv


@pytest.mark.slow
def test_a_client_of_openenv_holds_the_connection_of_its_session():
    openenv = pytest.importorskip("openenv.core")
    expect("_ws", None, lambda: openenv.GenericEnvClient("http://localhost:1")._ws)
    source = inspect.getsource(openenv.EnvClient)
    expect_lines("_ws", source, "self._ws = await ws_connect(", "await self._ws.send(", "self._ws.recv()")
