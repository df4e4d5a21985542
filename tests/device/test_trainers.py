"""Tests that other files define for the CPU, on a GPU or the stand-in for one: each is here by its import."""

# ruff: noqa: F401
from test_epo_trainer import (
    test_a_resumed_run_is_bit_equal_to_one_that_was_never_stopped,
    test_bf16_takes_nearly_the_same_step,
    test_evaluation_plays_the_whole_lists_once,
    test_lora_trains_the_adapter_alone_with_the_base_as_reference,
)
from test_generation_backends import test_a_rollout_of_concatenated_turns_is_the_same_without_what_was_kept
from test_method_table import test_its_gradient_does_not_depend_on_how_the_batch_is_cut
from test_ppo_trainer import (
    test_a_policy_with_an_adapter_trains_with_every_critic,
    test_a_run_with_gradient_checkpointing_is_bit_equal,
    test_old_log_probs_and_values_are_those_of_the_collecting_policy_in_every_epoch,
    test_the_gradient_does_not_depend_on_how_the_batch_is_cut,
)
from test_ppo_trainer import test_a_resumed_run_is_bit_equal_to_one_that_was_never_stopped as test_ppo_resumes_bit_equal
from test_resume import (
    test_a_checkpoint_inside_a_collected_batch_resumes_bit_equal,
    test_a_warm_start_of_rows_grouped_by_length_resumes_bit_equal,
)
from test_turn_forward import test_neither_checkpointing_nor_passes_run_again_change_anything
