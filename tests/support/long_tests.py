"""Tests that take long, and look at more models or cases of what another test looks at.

`make test-long` runs them; CI does not, which has to end in time on a slow machine. Each is the id of a test,
or, without its case, of all its cases.
"""

from __future__ import annotations

from typing import Final

LONG: Final = {
    "tests/test_models.py::test_training_is_bit_equal_in_the_memory_that_was_promised": (
        "resnet50 in full", "gpt2 in full", "resnet18", "vit", "llama", "bert",
    ),
    "tests/test_dynamic.py::test_built_in_models_train_as_plain_ones_at_every_size": ("bert", "llama"),
    "tests/test_offload_models.py::test_training_is_bit_equal": ("llama", "bert", "vit"),
    "tests/test_marks.py::test_frontier_reaches_the_recorded_one": ("t5", "resnet50"),
    "tests/test_strategies.py::test_none_is_better_than_the_default_on_reference_models": (),
    "tests/test_strategies.py::test_each_trains_as_plain_at_its_least_limit": (
        "convnet-checkmate", "convnet-checkmate-lp",
    ),
    "tests/test_peers.py::test_a_peer_has_the_figures_that_are_known": (),
    "tests/test_gpu_benchmark.py::test_a_dry_run_of_one_model": (),
    "tests/test_certificates.py::test_more_is_proven_for_what_the_caller_keeps": (),
    "tests/test_certificates.py::test_bounds_hold_for_every_kind_of_step": ("{'gradients': 'in_backward'}",),
    "tests/test_search_bounds.py::test_a_short_step_is_searched_less_and_a_long_one_as_before": (),
    "tests/test_checkpointed_layers.py::test_it_is_what_pytorch_takes_with_each_layer_checkpointed": ("t5",),
    "tests/test_api_interrupt.py::test_every_interrupt_ends_wrap": ("40",),
    "tests/test_api_interrupt.py::test_modules_whose_import_was_interrupted_are_whole": (
        "sympy.functions", "torch._inductor.config",
    ),
    "tests/test_cli_interrupt.py::test_while_the_model_is_captured": ("0.0", "0.9", "1.8"),
    "tests/test_cli_interrupt.py::test_while_blocks_are_solved": ("one process",),
    "tests/test_cli_interrupt.py::test_an_interrupt_that_is_swallowed_comes_again": ("__del__", "except"),
    "tests/test_first_calls.py::test_a_model_that_has_never_run_and_captures_outputs_is_planned": (
        "router-how2",
    ),
    "tests/test_graph_breaks.py::test_a_frontier_of_several_graphs_is_what_wrap_gives": (
        "{'compiler': 'inductor'}",
    ),
    "tests/test_pipeline_training.py::test_two_processes_train_as_plain_in_their_memory": (
        "gpipe", "interleaved",
    ),
    "tests/test_sharded_models.py::test_processes_train_models_as_plain_fsdp": (),
    "tests/test_gathers.py::test_models_whose_gathers_may_run_again_need_less": (),
    "tests/test_gathers.py::test_a_gather_costs_what_it_took_in_its_group": (),
    "tests/test_fsdp_launchers.py::test_accelerate_with_mixed_precision": (),
    "tests/test_fsdp_launchers.py::test_lightning": (),
    "tests/test_fsdp_launchers.py::test_accelerate_that_loads_by_way_of_meta": (),
    "tests/test_fsdp_launchers.py::test_scripts_start_with_torchrun": (
        "accelerate_fsdp2", "lightning_fsdp2", "trainer_fsdp2",
    ),
    # Inductor compiles for half a minute
    "tests/test_compiled_images.py::test_all_of_the_limit_is_the_plain_step": (),
    "tests/test_compiled_training.py::test_losses_stay_as_near_to_eager_as_stock_inductors": (
        "transformer-75%",
    ),
    "tests/test_compiled.py::test_draws_are_those_of_stock_inductor": (),
    "tests/test_compiled.py::test_a_compiled_step_keeps_its_limit": ("convnet-90%",),
    "tests/test_compiled_early.py::test_it_trains_as_plain_pytorch_within_rounding_at_its_least_limit": (
        "transformer",
    ),
    "tests/test_compiled_random.py::test_random_models_keep_the_limit_and_the_numbers": ("0", "3", "8"),
    "tests/test_cuda.py::test_a_compiled_step_keeps_its_limit": ("transformer-cpu",),
    "tests/test_opaque_pairs.py::test_compiled_by_inductor": ("LSTM",),
    "tests/test_setting_pairs.py::test_a_pair_that_is_allowed_keeps_its_limit_and_the_numbers": tuple(
        f'{one} and {other}'
        for one, other in (
            ('compiler="inductor"', 'strategy="checkmate"'),
            ("forwards", 'compiler="inductor"'),
            ('graph_breaks="plan"', 'compiler="inductor"'),
            ('compiler="inductor"', 'rewrites="none"'),
            ('compiler="inductor"', "units"),
            ("reserve", 'compiler="inductor"'),
        )
    ),
    "tests/test_setting_pairs.py::test_a_pair_plans_units_to_be_sharded": (),
    "tests/test_sharded_units.py::test_two_processes_train_as_plain_fsdp_in_other_nets": (),
    # `make compat` runs these as well
    "tests/compat/test_language_mechanisms.py::test_planned_with_little_effort": (
        "BART of 1+2 layers", "Mamba, slow path",
    ),
    "tests/compat/test_several_graphs.py::test_several_graphs": (
        "HuBERT-CTC; units `hubert.feature_extractor`, `hubert.encoder.layers.*`",
        "GAN, a backward each; units `generator`, `discriminator`",
    ),
    "tests/compat/test_steady_memory.py::test_fifty_steps_hold_what_the_first_holds": ("transformer",),
    "tests/compat/test_steady_memory.py::test_the_step_after_a_failed_one": ("forward",),
    "tests/compat/test_torch_databases.py::test_entries_train_as_plain_at_their_least_limit": tuple(
        map(str, range(3, 48))
    ),
}  # fmt: skip


def long_ids() -> set[str]:
    """The ids of these tests, those without a case of all their cases."""
    return {f"{test}[{case}]" if case else test for test, cases in LONG.items() for case in cases or ("",)}


def unknown(ids: set[str]) -> set[str]:
    """What is named here and is none of the tests that were collected, of files that were collected whole."""
    files = {each.partition("::")[0] for each in ids}
    return {each for each in long_ids() - ids if each.partition("::")[0] in files}
