"""Cases that only `pytest --extended` runs, so that the ordinary run stays short on two cores.

Each repeats a test that always runs with another layout, model, server or class. Tests that start Ray, a compiler or
several processes per case are worth an entry; a case that is the only one to show something is not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

EXTENDED_CASES: dict[str, tuple[str, ...]] = {  # by file: patterns of test names with parameters
    "bench/test_bench": (r"on_a_tiny_model\[llama3_1b, (documents|eager)",),
    "bench/test_peers": (r"cannot_be_imported_is_named\[raise",),
    "callbacks/test_built_in_callbacks": (
        r"equal_on_every_layout\[hsdp",
        r"in_their_places\[ddp-3\]",
    ),
    "callbacks/test_callback_state": (
        r"through_a_checkpoint_to_another_layout\[one-(zero1|zero3|ddp)",
        r"through_a_checkpoint_to_another_layout\[zero3-3-(zero|ddp)",
    ),
    "callbacks/test_callbacks_on_a_cluster": (
        r"a_kill_and_a_resize\[words0\]",
        r"costs_no_step\[words0\]",
    ),
    "combinations/test_combinations": (r"one_process\[(5-66|1-84)\]",),
    "data/loader/test_sampler": (r"statistics_match_numpy\[2\]",),
    "data/preprocess/test_input_files": (r"of_whole_documents\[tiktoken",),
    "data/preprocess/test_prepare": (r"preparation_is_resumed\[KeyboardInterrupt",),
    "data/samples/test_loader_workers": (r"readers_of_a_killed_process_end\[readers\]",),
    "data/samples/test_sample_training": (r"bits_of_one_process\[sentences-2\]",),
    "data/samples/test_samples_on_a_cluster": (r"through_faults\[(words0-sizes0|PlainStream-words0)\]",),
    "data/samples/test_streams": (
        r"audits_compare_batches_of_any_dataset\[(iterable|sentences)",
        r"bits_of_one_process\[(iterable|stateful loader)-2\]",
        r"bits_of_one_process\[hugging face-zero3-3\]",
        r"survive_the_loss_of_a_rank\[generator",
    ),
    "driver/test_interruption": (
        r"damaged_checkpoint_is_skipped\[(deleted shard|flipped byte of the manifest|truncated shard)",
    ),
    "driver/test_layout_change": (r"keeps_the_loss_curve\[2 ranks, DDP\]",),
    "driver/test_local_tier": (r"same_bits_as_the_run_directory\[4 ranks, ZeRO-3\]",),
    "driver/test_lost_processes": (
        r"no_step_is_lost\[[13]-",
        r"no_step_is_lost\[2-",
    ),
    "driver/test_object_storage": (
        r"resumed\[seaweedfs-(bit flipped|deleted|manifest deleted)",
        r"resumed\[moto-(deleted|truncated)",
        r"(another_directory|not_disturbed)\[seaweedfs",
        r"leaves_all_its_files\[moto",
        r"resumed\[seaweedfs-truncated",
    ),
    "examples/test_elastic_scripts": (
        r"bits_of_one_process\[ddp-2",
        r"bits_of_one_process\[hsdp-2x2",
    ),
    "examples/test_script_callbacks": (
        r"between_commit_and_checkpoint\[ddp\]",
        r"bits_of_one_process\[ddp-3-True\]",
    ),
    "examples/test_sharded_scripts": (
        r"language model-(zero1-2|zero2-3|ddp-3)",
        r"fine-tuning-ddp-3",
        r"language model-hsdp",
        r"prefetching-",
    ),
    "huggingface/test_round_trip": (r"on_any_layout\[qwen3, tied\]",),
    "huggingface/test_transformers_on_a_cluster": (r"changes_no_bit\[words0\]",),
    "huggingface/test_transformers_training": (
        r"plain_transformers_loop\[llama-(dp2|tp2|zero3-2)\]",
        r"compiled_blocks_keep_the_losses\[layout0",
        r"plain_transformers_loop\[(qwen3|gemma3)-tp2 x zero3-2\]",
    ),
    "optim/test_class_optimizer": (
        r"changes_its_layout_keeps_the_bits\[torch.optim.ASGD",
        r"bits_of_one_process\[torch.optim.(SGD|Adam|ASGD)\]",
        r"whole_parameters\[torch.optim.(Adamax|Adadelta|RAdam|RMSprop|Rprop|Adam)-",
        r"whole_parameters\[torch.optim.NAdam-(zero1-2|ddp-3|cp-2|pp-2|zero2-3)\]",
    ),
    "optim/test_muon": (
        r"whole_matrices\[llama-(ddp-2|zero1-2|zero2-3|cp-2|pp-2)\]",
        r"whole_matrices\[gpt2-(ddp-2|zero3-3|tp-2|pp-2)\]",
        r"whole_matrices\[moe-(ddp-2|zero3-3|tp-2|pp-2|ep-2)\]",
        r"bits_of_one_process\[(ddp-2|zero1-2|zero2-3)\]",
        r"to_disk_keeps_the_bits\[tp-2\]",
    ),
    "optim/test_offload": (r"no_file_is_left_when_the_process_ends\[done",),
    "optim/test_optimizers_on_a_cluster": (r"undisturbed_run\[class",),
    "optim/test_parameter_groups": (r"groups_of_torch\[(sgd|adamw)-tp-2 zero3-2\]",),
    "parallel/test_activation_offload": (r"offload_keeps_the_bits\[tp-2-none\]",),
    "parallel/test_compiled_layouts": (
        r"is_one_graph\[(gpt2: pp|llama: tp-3|llama: ring, documents|llama: LoRA, tp|moe: tp, recompute)\]",
        r"are_split\[llama: tiles\]",
        r"is_one_graph\[(gpt2: ring, recompute|llama: zero3, selective)\]",
        r"are_split\[llama: zbv, recompute\]",
    ),
    "parallel/test_float8": (
        r"like_one_process\[(zero3-2|selective recompute|tp-2|ring-2)\]",
        r"like_one_process\[words(0-zero3-2|1-tp-2)\]",
    ),
    "parallel/test_grouped_kernel": (r"changes_no_loss\[tp\]",),
    "parallel/test_layouts": (
        r"equals_one_process\[gpt2-(tp-2|ring-2|ulysses-2)\]",
        r"equals_one_process\[gpt2, six heads-(tp-4|ring-3)\]",
        r"equals_one_process\[llama-(tp-4|ulysses-3|pp-2)\]",
        r"equals_one_process\[qwen3-(tp-2|zero3-2 x pp-2, zbv)\]",
        r"equals_one_process\[llama, (two groups of three-tp-2|three tokens-tp-4|50257 tokens-tp-2)\]",
        r"equals_one_process\[moe-(ep-3|ring-2, ep-2)\]",
        r"equals_one_process\[moe, bias-ep-2 x tp-2\]",
    ),
    "parallel/test_lora_layouts": (
        r"one_process\[(gpt2-tp 2|gpt2-tiles|llama-ring 2)\]",
        r"one_process\[llama-tp 3\]",
    ),
    "parallel/test_loss_chunks": (
        r"whole_logits_in_one_process\[gpt2-(ddp|tp-3|ring|one process)",
        r"whole_logits_in_one_process\[llama-(tp-2 x zero3|zero2)",
    ),
    "parallel/test_module_plan": (r"losses_and_norms_of_one_process\[(tp2 x zero3-2|tp3)\]",),
    "parallel/test_peak_memory": (
        r"matches_the_plan\[(alone, full|dp-2|zero1-2|zero2-2|cp-2|pp-2, gpipe)-llama\]",
        r"matches_the_plan\[(alone|alone, selective|zero3-2|tp-2|pp-2, many microbatches)-gpt2\]",
        r"one microbatch each-gpt2\]",
        r"matches_the_plan\[zero3-2 x tp-2-gpt2\]",
    ),
    "parallel/test_state_memory": (
        r"activation_memory_matches_the_plan\[(gpt2-\w+-2|qwen3-\w+-1|llama-full)",
        r"state_memory_matches_the_plan\[(alone|dp-2|zero2-2|zero3-2)\]",
        r"state_memory_matches_the_plan\[(zero1-2|alone, moments in bf16)\]",
    ),
    "parallel/test_tiled_linear": (
        r"equals_one_process\[llama-zero3-2, recompute",
        r"equals_one_process\[gpt2-zero3-2 x pp-2, zbv",
    ),
    "parallel/test_weight_copies": (r"change_no_bit\[compiled",),
    "parallel/test_zero_plus_plus": (r"own_groups_of_a_node\[pp\]",),
    "planner/test_calibration": (r"from_its_predictions\[true1\]",),
    "sweeps/test_sweep_runner": (r"of_one_in_one_go\[random\]",),
    "training/test_compile_warmup": (
        r"compiles_nothing\[(cp, documents|pp, deferred weight gradients, LoRA|tp)\]",
        r"compiles_nothing\[(ZeRO-3, float8, uneven|replicas, dropout)\]",
    ),
    "training/test_elastic_determinism": (
        r"at_any_dp_degree\[.*-ep: (2 of ddp-2|3 of zero2-3|2 of zero1-4|cp|cp x zero3|pp)\]",
        r"at_any_dp_degree\[moe-.*-(ep: tp|ep: 2 of zero3-4|ep: 2 of hsdp3-2x2|ep: cp x dp|zero3-4)\]",
        r"at_any_dp_degree\[gpt2-.*-pp: ddp-3\]",
        r"every_degree_and_stage_gives_the_same_bits\[(zero3-5, recompute|hsdp2-2x2)\]",
    ),
    "training/test_memory_recovery": (r"keeps_the_losses\[(zero-1-True|zero-3-False)",),
    "training/test_step_audits": (
        r"no_alarm\[(ddp-2|zero1-2|zero2-3|hsdp|ulysses|pp2 x ddp-3|ep2\]|ep2 x zero3|ep4)",
        r"other_features\[(train.compile|parallel.zero=3 parallel.tile|data.packing)",
        r"named_and_undone\[(ddp-2|ring2|zbv|zero3-4, recompute)-\d-(batch|activation)",
        r"named_and_undone\[(pp2 x ddp-3|ep2 x ddp-2)-\d-batch",
        r"result_are_found\[gradient-(6|12|23|31)",
        r"result_are_found\[activation-(6|22|30)",
        r"after_the_passes_is_named_and_undone\[(?!ddp-5-sum-0|zero2-3-message-31|zero3-4, recompute-update-11|"
        r"hsdp-2x2-reduced-0|tp2 x ddp-2-message-11|pp2 x ddp-3-sum-31|zbv x zero3-2-update-0|ep2 x zero3-2-sum-11)",
        r"changes_in_memory_is_found\[(?!zero3-4, recompute-bitflip_moment-0|hsdp-2x2-bitflip-31|"
        r"ep2 x zero3-2-bitflip_weight-11)",
        r"after_the_passes_is_named\[(zero2-3-sum|ddp-5)",
        r"orthogonalized_wrong_is_named\[(ddp-5|tp2|pp2|ep2)",
        r"other_features\[optimizer.name=(muon parallel.tp|torch|sgd)",
    ),
    "training/test_options": (r"recompute_keeps_the_losses\[layout0",),
    "worker/test_imports": (r"distributed_tensors\[(true|false)\]",),
}

EXTENDED_TESTS: dict[tuple[str, str], str] = {  # file and name of tests that only --extended runs: what shows it always
    ("bench/test_bench", "test_rows_of_gpu_speed_run_on_a_tiny_model"): "bench/test_gpu_loss_curves, bench/test_peers",
    (
        "cli/test_sweep",
        "test_a_search_over_real_runs_is_compared_in_a_report",
    ): "sweeps/test_killed_sweep, test_sweep_api",
    ("driver/test_local_tier", "test_two_nodes_continue_from_their_own_disks"): (
        "driver/test_nodes_without_a_common_directory"
    ),
    ("driver/test_ray_placement", "test_placement_on_two_racks"): "planner/test_placement; the same on uneven nodes",
    (
        "driver/test_ray_data",
        "test_full_object_store_does_not_change_the_losses",
    ): "driver/fault_matrix; the other tests",
    ("driver/test_ray_interruption", "test_repeated_interruptions"): "jobs/test_job_submit, driver/test_interruption",
    ("driver/test_trial_slots", "test_a_sweep_starts_one_ray_for_all_trials"): "the other tests of the file",
    ("driver/test_two_nodes", "test_neighboring_ranks_share_a_node"): "driver/test_ray_placement, on uneven nodes",
    ("jobs/test_job_submit", "test_wrong_config_fails_and_is_logged"): "cli/test_wrong_inputs",
}


def is_extended(file: str, test_name: str) -> bool:
    """Return whether a test runs only with --extended. `file`: as in EXTENDED_CASES; `test_name`: with parameters."""
    return (file, test_name.split("[")[0]) in EXTENDED_TESTS or any(
        re.search(pattern, test_name) for pattern in EXTENDED_CASES.get(file, ())
    )


def list_unused(tests: Iterable[tuple[str, str]]) -> list[str]:
    """Return the patterns that match none of the tests, given by file and name."""
    names_by_file: dict[str, list[str]] = {}
    for file, name in tests:
        names_by_file.setdefault(file, []).append(name)
    return [
        f"{file}: {pattern}"
        for file, patterns in EXTENDED_CASES.items()
        for pattern in patterns
        if not any(re.search(pattern, name) for name in names_by_file.get(file, ()))
    ]
