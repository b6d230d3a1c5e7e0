"""Cases that only `pytest --extended` runs, so that the ordinary run stays short on two cores.

Each repeats a test that always runs with another layout, model, server or class. Tests that start Ray, a compiler or
several processes per case are worth an entry; a case that is the only one to show something is not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

EXTENDED_CASES: dict[str, tuple[str, ...]] = {  # by file: patterns of test names with parameters
    "bench/test_peers": (
        r"cannot_be_imported_is_named\[raise",
        r"test_transformers_builds_the_platforms_model\[llama\]",
    ),
    "callbacks/test_built_in_callbacks": (
        r"equal_on_every_layout\[hsdp",
        r"in_their_places\[ddp-3\]",
        r"equal_on_every_layout\[zero1-2\]",
        r"in_their_places\[zero1-2\]",
    ),
    "callbacks/test_callback_state": (
        r"through_a_checkpoint_to_another_layout\[one-",
        r"through_a_checkpoint_to_another_layout\[zero3-3-(zero|ddp)",
        r"and_a_joining_one\[(ddp-3|zero1-2)\]",
    ),
    "callbacks/test_callbacks_on_a_cluster": (
        r"a_kill_and_a_resize\[words0\]",
        r"costs_no_step\[words0\]",
    ),
    "combinations/test_combinations": (r"one_process\[(5-66|1-84|3-18)\]",),
    "data/loader/test_sampler": (r"statistics_match_numpy\[2\]",),
    "data/preprocess/test_input_files": (r"of_whole_documents\[tiktoken",),
    "data/preprocess/test_prepare": (r"preparation_is_resumed\[KeyboardInterrupt",),
    "data/samples/test_loader_workers": (r"readers_of_a_killed_process_end\[readers\]",),
    "data/samples/test_sample_training": (
        r"bits_of_one_process\[sentences-2\]",
        r"bits_of_one_process\[(sentences-(3|zero1-2)|images-zero3-3)\]",
    ),
    "data/samples/test_samples_on_a_cluster": (r"every_sample_.*_through_faults\[words0-sizes0\]",),
    "data/samples/test_streams": (
        r"audits_compare_batches_of_any_dataset\[(iterable|sentences|loaders|samples)",
        r"bits_of_one_process\[((iterable|stateful loader)-2|(hugging face|stateful loader)-zero3-3)\]",
        r"undisturbed_one\[(stateful|loader|stateful loader|loader that reads again|hugging face)\]",
        r"on_as_many_ranks\[(class|hugging face parts|generator)\]",
        r"survive_the_loss_of_a_rank\[(generator|loaders)",
        r"from_the_beginning\[0\]",
    ),
    "driver/test_spare_audits": (r"audit_while_ranks_train\[parallel.zero=3", r"broken_spare_is_replaced\[2\]"),
    "driver/test_dry_run": (r"shard_of_the_model\[(zero3-(514|2049)|hsdp-(0|2049)|replicas-(514|2049))\]",),
    "driver/test_interruption": (
        r"damaged_checkpoint_is_skipped\[(deleted|flipped byte of the manifest|truncated shard)",
        r"kill_during_a_checkpoint_write\[in a shard\]",
    ),
    "driver/test_layout_change": (r"keeps_the_loss_curve\[2 ranks, DDP\]",),
    "driver/test_local_tier": (r"same_bits_as_the_run_directory\[4 ranks, ZeRO-3(, then 2, DDP)?\]",),
    "driver/test_object_storage": (
        r"resumed\[seaweedfs-(bit flipped|deleted|manifest deleted|truncated)",
        r"resumed\[moto-(deleted|truncated|manifest deleted)",
        r"(another_directory|not_disturbed|overwrites_nothing)\[seaweedfs",
        r"leaves_all_its_files\[moto",
    ),
    "examples/test_elastic_scripts": (
        r"bits_of_one_process\[ddp-2",
        r"bits_of_one_process\[hsdp-2x2",
    ),
    "examples/test_script_callbacks": (
        r"between_commit_and_checkpoint\[ddp\]",
        r"bits_of_one_process\[ddp-3-",
    ),
    "examples/test_sharded_scripts": (
        r"language model-(zero1-2|zero2-3|ddp-3)",
        r"fine-tuning-(ddp-3|zero3-3)",
        r"language model-hsdp",
        r"prefetching-",
    ),
    "huggingface/test_lora": (r"only_adapters_are_trained\[(dp|zero1)\]",),
    "huggingface/test_round_trip": (r"on_any_layout\[qwen3, tied\]",),
    "huggingface/test_transformers_training": (
        r"plain_transformers_loop\[llama-(dp2|tp2|zero3-2)\]",
        r"plain_transformers_loop\[(qwen3|gemma3|qwen3_moe)-tp2 x zero3-2\]",
    ),
    "optim/test_bf16_moments": (r"bits_of_one_process\[(dp-3-(adamw|muon)|zero3-2-adamw|zero1-3-muon)\]",),
    "optim/test_class_optimizer": (
        r"changes_its_layout_keeps_the_bits\[torch.optim.ASGD",
        r"bits_of_one_process\[(torch.optim.(SGD|Adam|ASGD|Adagrad)|tests.optim.own_optimizers.DecayingSign)\]",
        r"whole_parameters\[torch.optim.(SGD|Adam|AdamW|Adamax|Adadelta|Adagrad|ASGD|RAdam|RMSprop|Rprop)-",
        r"whole_parameters\[torch.optim.NAdam-(zero1-2|ddp-3|cp-2|pp-2|zero2-3|zero3-3|tp-2|tp-2 zero3-2)\]",
    ),
    "optim/test_muon": (
        r"whole_matrices\[llama-(ddp-2|zero1-2|zero2-3|zero3-3|cp-2|pp-2|pp-2 zero2-2|hsdp-2x2|tp-2)\]",
        r"whole_matrices\[gpt2-(ddp-2|zero3-3|tp-2|tp-2 zero3-2|pp-2|pp-2 zero2-2)\]",
        r"whole_matrices\[moe-(ddp-2|zero3-3|tp-2|pp-2|ep-2|hsdp-2x2)\]",
        r"bits_of_one_process\[(ddp-2|ddp-5|zero1-2|zero2-3|zero3-4)\]",
        r"to_disk_keeps_the_bits\[tp-2\]",
    ),
    "optim/test_offload": (r"no_file_is_left_when_the_process_ends\[done",),
    "optim/test_parameter_groups": (
        r"groups_of_torch\[(sgd|adamw|path)-tp-2 zero3-2\]",
        r"groups_of_torch\[adamw-zero2-3\]",
        r"matrices_of_muon\[zero3-3\]",
    ),
    "parallel/test_activation_offload": (
        r"offload_keeps_the_bits\[(dp-2|zero3-2|tp-2|ring-2|pp-2|pp-2, zbv)-none\]",
        r"offload_keeps_the_bits\[(zero3-2|pp-2, zbv|tp-2)-selective\]",
        r"offload_keeps_the_bits\[pp-2, zbv-full\]",
    ),
    "parallel/test_compiled_layouts": (
        r"is_one_graph\[(gpt2: pp|llama: tp-3|llama: ring, documents|moe: tp, recompute|moe: ring)\]",
        r"is_one_graph\[(gpt2: ring, recompute|llama: zero3, selective|llama: tp x zero1, recompute)\]",
        r"is_one_graph\[gpt2: Ulysses, bf16",
        r"are_split\[(llama: (tiles|zbv, recompute)|moe: ep, recompute)\]",
    ),
    "parallel/test_float8": (
        r"like_one_process\[(ddp-2|zero3-2|selective recompute|tp-2|tp-4, replicated keys and values|ring-2)\]",
        r"like_one_process\[words(0-zero3-2|1-tp-2)\]",
    ),
    "parallel/test_float8_all_gather": (r"travel_in_bf16\[zero3-3\]",),
    "parallel/test_grouped_kernel": (r"changes_no_loss\[(tp|ep|ep, compiled)\]",),
    "parallel/test_layouts": (
        r"equals_one_process\[gpt2-(tp-2|ring-2|ulysses-2|zero3-2 x pp-2, zbv)\]",
        r"equals_one_process\[gpt2, six heads-",
        r"equals_one_process\[llama-(tp-3|tp-4|ulysses-3|ring-4|pp-2|pp-4, gpipe)\]",
        r"equals_one_process\[llama-(dp-2 x tp-2|zero1-2 x tp-2|dp-2 x ring-2|ulysses-2 x tp-2)\]",
        r"equals_one_process\[qwen3-(tp-2|ulysses-2 x tp-2|zero3-2 x pp-2, zbv)\]",
        r"equals_one_process\[llama, (two groups of three-tp-(2|4)|three tokens-|50257 tokens-tp-2)",
        r"equals_one_process\[gpt2-zero1-2 x tp-2",
        r"equals_one_process\[moe-(ep-3|ring-2, ep-2)\]",
        r"equals_one_process\[moe, bias-(ep-3|ep-2 x tp-2)\]",
        r"activation_checkpointing_keeps_the_losses\[(ring-2 x ulysses-2|tp-2-selective)",
        r"close_to_fp64\[llama-(tp-2|ring-2|ulysses-2 x tp-2|zero3-2 x pp-2, zbv)\]",
    ),
    "parallel/test_lora_layouts": (
        r"one_process\[(gpt2-tp 2|gpt2-tiles|llama-ring 2|llama-tiles x tp 2)\]",
        r"one_process\[(llama-tp 3|llama-tp 2 x pp 2|moe-tp 2 x ZeRO-3)\]",
    ),
    "parallel/test_loss_chunks": (
        r"compiled_chunks_equal_whole_logits\[(dtype0-1e-13-1|dtype1-0.01-3)\]",
        r"whole_logits_in_one_process\[gpt2-(ddp|tp-3|ring|one process|zero3-2, tiles)",
        r"whole_logits_in_one_process\[llama-(tp-2 x zero3|zero2|ddp-3|tp-3)",
        r"whole_logits_in_one_process\[gpt2-zero2-2 x pp-2, zbv",
        r"close_to_those_of_whole_logits\[words(0|2)\]",
    ),
    "parallel/test_module_plan": (r"losses_and_norms_of_one_process\[tp(2|2 x ddp2|2 x zero1-2|2 x zero3-2|3)\]",),
    "parallel/test_packed_training": (r"equals_one_process\[(llama-dp-3|gpt2-tp-2)\]",),
    "parallel/test_peak_memory": (
        r"audits_are_planned\[(dp-2|zero3-2 x tp-2)\]",
        r"elastic_determinism_are_planned\[(alone|dp-2|zero1-2|zero2-2)-1|are_planned\[(alone|dp-2|zero1-2|zero3-2)-4",
        r"matches_the_plan\[(zero3-2 x tp-2-llama|cp-2-gpt2|pp-2, gpipe-gpt2|alone, selective-llama)",
        r"matches_the_plan\[(dp-2|zero1-2|zero2-2|zero3-2|tp-2|cp-2|pp-2|pp-2, gpipe|pp-2, zbv)-llama\]",
        r"matches_the_plan\[(alone|zero3-2|tp-2|pp-2|pp-2, many microbatches|pp-2 x tp-2|zero3-2 x tp-2)-gpt2\]",
        r"one microbatch each-gpt2\]",
        r"matches_the_plan\[alone, (full|selective in two layers|offload)-",
        r"matches_the_plan\[alone, (selective|full in one layer|full in three layers and offload|long)-gpt2\]",
        r"matches_the_plan\[alone, (selective and offload|one microbatch|one microbatch, full in two layers)-llama\]",
        r"matches_the_plan\[pp-2, offload-",
        r"matches_the_plan\[pp-2, (full in one layer|zbv, full|zbv, offload)-gpt2\]",
        r"matches_the_plan\[pp-2 x tp-2-llama\]",
    ),
    "parallel/test_state_memory": (
        r"activation_memory_matches_the_plan\[(gpt2-\w+-2|qwen3-\w+-1|llama-full)",
        r"activation_memory_matches_the_plan\[((llama|qwen3)-selective-2|experts-full-2)\]",
        r"state_memory_matches_the_plan\[(alone|dp-2|zero2-2|zero3-2)\]",
        r"state_memory_matches_the_plan\[(zero1-2|alone, moments in bf16|zero3-4, ep-2|zero3-2 x tp-2)\]",
    ),
    "parallel/test_tiled_linear": (
        r"equals_one_process\[llama-zero3-2, recompute",
        r"equals_one_process\[gpt2-zero3-2 x pp-2, zbv",
        r"gathered_at_a_time\[selective\]",
    ),
    "parallel/test_weight_copies": (
        r"change_no_bit\[compiled",
        r"change_no_bit\[ulysses-2 x tp-2",
        r"change_no_bit\[(one rank|selective recomputation|moe|dp-3|tp-3|dp-2 x tp-2|ring-2|pp-4, gpipe|ep-2 x tp-2)\]",
    ),
    "parallel/test_zero_plus_plus": (
        r"own_groups_of_a_node\[pp\]",
        r"send_fewer_bytes\[(weights|gradients)\]",
    ),
    "planner/test_calibration": (r"from_its_predictions\[true1\]",),
    "planner/test_flops": (r"parameters_and_flops\[(gpt2_1.5b|llama3_8b|llama3_70b)\]",),
    "runtime/test_bit_flips": (r"changes_its_step_alone\[zero3\]",),
    "snapshot/test_shared_memory": (r"lost_process_is_readable\[9\]",),
    "sweeps/test_sweep_runner": (r"of_one_in_one_go\[random\]",),
    "training/test_compile_warmup": (
        r"compiles_nothing\[(?!a user's module and samples)",
        r"it_compiles_for\[6",
    ),
    "training/test_data_parallel_parity": (
        r"of_one_process\[fp64-(ddp-2|zero2-4|zero3-5|hsdp1-2x2|hsdp2-2x2)\]",
        r"of_one_process\[fp32-(ddp-4|ddp-5|zero2-5|zero3-3)\]",
    ),
    "training/test_elastic_combinations": (r"same_bits\[([6-9]|[0-9]{2,})\]",),
    "training/test_elastic_determinism": (
        r"at_any_dp_degree\[.*-ep: (2 of ddp-2|3 of zero2-3|2 of zero1-4|cp|cp x zero3|pp)\]",
        r"at_any_dp_degree\[moe-.*-(ep: tp|ep: 2 of (zero3-4|ddp-4)|ep: 2 of hsdp3-2x2|ep: cp x dp|zero3-4|ddp-3)\]",
        r"at_any_dp_degree\[(gpt2-.*-pp: ddp-3|gpt2-overrides9-pp|llama-.*-(tp: ddp-3|cp: ddp-2))",
        r"at_any_dp_degree\[(gpt2-.*-zero3-4|llama-.*-hsdp2-2x2|llama-overrides29-zero3-4)",  # the others in bf16
        r"every_degree_and_stage_gives_the_same_bits\[(ddp-2|zero1-2|zero3-5, recompute|hsdp2-2x2)\]",
        r"of_those_that_do_not\[interleaved_zero_bubble\]",
    ),
    "training/test_initial_weights": (r"initial_weights\[(tp-2|one rank, bf16)\]",),
    "training/test_memory_recovery": (
        r"keeps_the_losses\[(zero-1-True|zero-3-False)",
        r"outlives_its_generation\[parallel.(dp_replicate|cp)=2\]",
    ),
    "training/test_options": (
        r"recompute_keeps_the_losses\[layout0",
        r"of_sharded_weights\[model0\]",
    ),
    "training/test_audits_in_pieces": (
        r"found_by_pieces\[(ddp-2|zero3-2, sgd|ep2 x ddp-2|tp2 x zero3-2, offload|pp2 x ddp-2)",
    ),
    "training/test_pass_state_audits": (
        r"raise_no_alarm\[(?!interleaved|ep2, recompute)",
        r"wrong_is_named_and_undone\[(?!zbv x ddp-2-2|ddp-3-0)",
    ),
    "training/test_memory_growth": (
        r"plain\]|do_not_become_more\[ddp-2",
        r"do_not_become_more\[(ddp-3-(audits|samples)|zero1-3-(elastic|samples)|zero3-2, tp2)",
        r"do_not_become_more\[pp2 x ddp-2-(elastic|audits)",
    ),
    "training/test_spare_audits": (
        r"bits_as_the_ranks\[(ddp-2|zero2-3|hsdp-2x2|ulysses2 x ddp-2|ep2|ep2 x ddp-2|ep4 x cp2 x tp2)\]",
        r"bits_as_the_ranks\[(ddp-5|ring2 x zero3-2|zbv x zero3-2|zero1-2)\]",
        r"other_features\[(train.dtype=bf16|data.packing|parallel.zero=3 parallel.quantize)",
        r"other_features\[(train.compile|parallel.zero=3 train.dtype=float8)",
    ),
    "training/test_total_audits": (
        r"computed_again\[(?!ddp-2-losses|zero2-3-squares|pp2 x ddp-2, biases-loads)",
        r"ends_the_generation\[tp2 x ddp-2-losses",
    ),
    "training/test_step_audits": (
        r"no_alarm\[(?!one rank|ddp-5)",  # of the others, a run with one fault has no other alarm
        r"other_features\[(train.compile|parallel.zero=3 parallel.tile|data.packing|train.loss_chunks|"
        r"parallel.activation_offload|parallel.zero=3 train.dtype=float8)",
        r"fault_is_named_and_undone\[(?!ddp-2-gradient-22|ddp-5-batch-11|tp2 x ddp-2-activation-11|"
        r"pp2 x ddp-3-activation-22|ep2 x ddp-2-gradient-22)",
        r"result_are_found\[gradient-(6|12|22|23|31)",
        r"result_are_found\[activation-(6|22|23|30)",
        r"after_the_passes_is_named_and_undone\[(?!ddp-5-sum-0|zero2-3-message-31|zero3-4, recompute-update-11|"
        r"hsdp-2x2-reduced-0)",
        r"gradients_that_differ_are_found\[(ddp-5|tp2 x ddp-2-False)",
        r"after_the_passes_is_named\[(zero2-3-sum|ddp-5|hsdp-2x2)",
        r"orthogonalized_wrong_is_named\[(zero3-4|tp2|pp2|ep2)",
        r"other_features\[optimizer.name=(muon|torch|sgd)",
    ),
    "training/test_state_audits": (
        r"changes_in_memory_is_found\[(?!zero3-4, recompute-bitflip_moment-0|hsdp-2x2-bitflip-31)",
        r"the_error_is_undone\[(?!zero1-2)",
        r"before_the_first_step_is_found\[(ddp-2-weight|zero3-4, recompute-moment)",
        r"during_a_step_is_found\[(zero2-3-flip before|ddp-2-flip after)",
    ),
    "training/test_step_guard": (
        r"keeps_the_loss_curve\[zero3-3\]",
        r"since_the_checkpoint\[(ddp-2|pp-2)\]",
    ),
    "worker/test_imports": (r"distributed_tensors\[(true|false)\]",),
}

EXTENDED_TESTS: dict[tuple[str, str], str] = {  # file and name of tests that only --extended runs: what shows it always
    ("bench/test_bench", "test_rows_of_gpu_speed_run_on_a_tiny_model"): (
        "the other tests of the file; bench/test_peers"
    ),
    ("bench/test_bench", "test_torch_baseline_has_the_losses_of_the_platform"): (
        "bench/test_peers, with transformers as the peer"
    ),
    ("bench/test_gpu_loss_curves", "test_dry_run_without_ray_compares_float8_with_fp32"): (
        "the other tests of the file; parallel/test_float8"
    ),
    ("bench/test_peers", "test_device_measures_the_cpu_where_there_is_no_gpu"): (
        "the other tests of the file: rows of a GPU, losses of peers"
    ),
    ("callbacks/test_callbacks_on_a_cluster", "test_state_survives_a_restart"): (
        "callbacks/test_callback_state: through a checkpoint to another layout; the test with a kill and a resize"
    ),
    ("checkpoint/test_object_store", "test_with_every_third_request_failing_nothing_is_lost"): (
        "driver/test_object_storage: with every third request failing, the run is the same"
    ),
    ("cli/test_sweep", "test_a_search_over_real_runs_is_compared_in_a_report"): (
        "sweeps/test_killed_sweep, test_sweep_api"
    ),
    ("data/loader/test_exactly_once", "test_ray_readers_give_the_same_bytes_even_if_killed"): (
        "driver/test_ray_data: killed readers do not change the losses"
    ),
    ("data/preprocess/test_executors", "test_local_ray_runs_few_daemons_and_is_shut_down"): (
        "test_ray_private: a local Ray and its daemons; the engines of the file"
    ),
    ("data/samples/test_samples_on_a_cluster", "test_streams_are_used_once_per_epoch_through_faults"): (
        "data/samples/test_streams, without Ray; rows of Ray Data through a kill and a shrink"
    ),
    ("driver/test_local_tier", "test_two_nodes_continue_from_their_own_disks"): (
        "driver/test_object_storage: from node-local checkpoints; the other tests of the file"
    ),
    ("driver/test_lost_processes", "test_no_step_is_lost"): (
        "driver/test_two_nodes: all workers are killed; driver/test_ray_faults"
    ),
    ("driver/test_nodes_without_a_common_directory", "test_another_machine_continues_with_the_same_bits"): (
        "driver/test_object_storage: resumed from another directory; driver/test_two_nodes"
    ),
    ("driver/test_ray_data", "test_full_object_store_does_not_change_the_losses"): (
        "driver/fault_matrix; the other tests"
    ),
    ("driver/test_growing_cluster", "test_axes_left_to_the_planner_are_chosen_again"): (
        "the other test of the file; driver/test_auto_layout, test_membership_planner"
    ),
    ("driver/test_ray_faults", "test_audits_find_a_wrong_shard_that_no_other_rank_has"): (
        "training/test_step_audits: shards of ZeRO; the other audits of the file"
    ),
    ("driver/test_spare_audits", "test_a_transient_fault_of_a_rank_is_undone"): (
        "driver/test_spare_audit_calls: a rank that was wrong; the broken rank in the same file"
    ),
    ("driver/test_trial_slots", "test_the_ray_of_a_killed_sweep_lasts_until_its_trials_have_saved"): (
        "sweeps/test_killed_sweep; the other tests of the file"
    ),
    ("driver/test_ray_faults", "test_a_persistent_fault_is_found_within_the_automatic_interval"): (
        "the other audits of the file; elastic/test_audit_schedule"
    ),
    ("driver/test_ray_faults", "test_resize_changes_the_number_of_workers"): (
        "driver/test_growing_cluster, cli/test_resize, callbacks/test_callbacks_on_a_cluster"
    ),
    ("driver/test_ray_interruption", "test_repeated_interruptions"): ("jobs/test_job_submit, driver/test_interruption"),
    ("driver/test_ray_placement", "test_placement_on_two_racks"): ("planner/test_placement"),
    ("driver/test_ray_placement", "test_placement_on_uneven_nodes"): (
        "planner/test_placement; driver/test_two_nodes: neighboring ranks share a node"
    ),
    ("driver/test_trial_slots", "test_a_sweep_starts_one_ray_for_all_trials"): ("the other tests of the file"),
    ("driver/test_two_nodes", "test_a_node_whose_network_is_down_is_left"): (
        "driver/test_network_partition; a link that is down in driver/test_ray_faults; elastic/test_link_attribution"
    ),
    ("driver/test_two_nodes", "test_the_node_of_a_rank_that_computes_wrong_is_left"): (
        "audits in driver/test_ray_faults; nodes that are left in driver/test_network_partition"
    ),
    ("driver/test_two_nodes", "test_neighboring_ranks_share_a_node"): (
        "a node is lost in the same file: neighboring ranks share a node; planner/test_placement"
    ),
    ("driver/test_two_nodes", "test_too_many_workers_are_refused_with_both_numbers"): (
        "driver/test_cluster_room; the message in driver/test_growing_cluster"
    ),
    ("examples/test_attached_loop", "test_run_resumes_from_its_checkpoint_if_all_workers_are_killed"): (
        "examples/test_sharded_scripts: a run resumes; driver/test_two_nodes: all workers are killed"
    ),
    ("huggingface/test_transformers_on_a_cluster", "test_a_killed_rank_changes_no_bit"): (
        "the other test of the file, with tensor parallelism"
    ),
    ("huggingface/test_transformers_training", "test_compiled_blocks_keep_the_losses"): (
        "training/test_options: compiled blocks; parallel/test_compiled_layouts"
    ),
    ("optim/test_muon", "test_elastic_runs_with_experts_or_tensor_parallelism_have_the_same_bits"): (
        "elastic runs of HSDP, and whole matrices with tp and experts, in the same file"
    ),
    ("jobs/test_job_submit", "test_wrong_config_fails_and_is_logged"): ("cli/test_wrong_inputs"),
    ("optim/test_optimizers_on_a_cluster", "test_the_curve_is_that_of_an_undisturbed_run"): (
        "driver/test_ray_faults; momentum recovered from memory in optim/test_muon, optim/test_class_optimizer"
    ),
    ("parallel/test_tiled_linear", "test_a_checkpoint_resumes_with_and_without_tiling"): (
        "the first test of the file: its checkpoint is that of one process"
    ),
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
