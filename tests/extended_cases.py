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
    "callbacks/test_built_in_callbacks": (r"equal_on_every_layout\[hsdp",),
    "callbacks/test_callback_state": (
        r"through_a_checkpoint_to_another_layout\[one-(zero1|zero3|ddp)",
        r"through_a_checkpoint_to_another_layout\[zero3-3-(zero|ddp)",
    ),
    "data/samples/test_samples_on_a_cluster": (r"through_faults\[(words0-sizes0|PlainStream-words0)\]",),
    "data/samples/test_streams": (
        r"bits_of_one_process\[(iterable|stateful loader)-2\]",
        r"bits_of_one_process\[hugging face-zero3-3\]",
        r"survive_the_loss_of_a_rank\[generator",
    ),
    "driver/test_interruption": (
        r"damaged_checkpoint_is_skipped\[(deleted shard|flipped byte of the manifest|truncated shard)",
    ),
    "driver/test_object_storage": (
        r"resumed\[seaweedfs-(bit flipped|deleted|manifest deleted)",
        r"resumed\[moto-(deleted|truncated)",
        r"(another_directory|not_disturbed)\[seaweedfs",
        r"leaves_all_its_files\[moto",
    ),
    "examples/test_elastic_scripts": (r"bits_of_one_process\[ddp-2",),
    "examples/test_sharded_scripts": (
        r"language model-(zero1-2|zero2-3|ddp-3)",
        r"fine-tuning-ddp-3",
    ),
    "huggingface/test_transformers_training": (
        r"plain_transformers_loop\[llama-(dp2|tp2|zero3-2)\]",
        r"compiled_blocks_keep_the_losses\[layout0",
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
    ),
    "optim/test_offload": (r"no_file_is_left_when_the_process_ends\[done",),
    "optim/test_optimizers_on_a_cluster": (r"undisturbed_run\[class",),
    "parallel/test_compiled_layouts": (
        r"is_one_graph\[(gpt2: pp|llama: tp-3|llama: ring, documents|llama: LoRA, tp|moe: tp, recompute)\]",
        r"are_split\[llama: tiles\]",
    ),
    "parallel/test_float8": (
        r"like_one_process\[(zero3-2|selective recompute|tp-2|ring-2)\]",
        r"like_one_process\[words(0-zero3-2|1-tp-2)\]",
    ),
    "parallel/test_layouts": (
        r"equals_one_process\[gpt2-(tp-2|ring-2|ulysses-2)\]",
        r"equals_one_process\[gpt2, six heads-(tp-4|ring-3)\]",
        r"equals_one_process\[llama-(tp-4|ulysses-3|pp-2)\]",
        r"equals_one_process\[qwen3-(tp-2|zero3-2 x pp-2, zbv)\]",
        r"equals_one_process\[llama, (two groups of three-tp-2|three tokens-tp-4|50257 tokens-tp-2)\]",
        r"equals_one_process\[moe-(ep-3|ring-2, ep-2)\]",
        r"equals_one_process\[moe, bias-ep-2 x tp-2\]",
    ),
    "parallel/test_lora_layouts": (r"one_process\[(gpt2-tp 2|gpt2-tiles|llama-ring 2)\]",),
    "parallel/test_loss_chunks": (
        r"whole_logits_in_one_process\[gpt2-(ddp|tp-3|ring|one process)",
        r"whole_logits_in_one_process\[llama-(tp-2 x zero3|zero2)",
    ),
    "parallel/test_peak_memory": (
        r"matches_the_plan\[(alone, full|dp-2|zero1-2|zero2-2|cp-2|pp-2, gpipe)-llama\]",
        r"matches_the_plan\[(alone|alone, selective|zero3-2|tp-2|pp-2, many microbatches)-gpt2\]",
        r"one microbatch each-gpt2\]",
    ),
    "parallel/test_state_memory": (
        r"activation_memory_matches_the_plan\[(gpt2-\w+-2|qwen3-\w+-1|llama-full)",
        r"state_memory_matches_the_plan\[(alone|dp-2|zero2-2|zero3-2)\]",
    ),
    "parallel/test_tiled_linear": (r"equals_one_process\[llama-zero3-2, recompute",),
    "training/test_compile_warmup": (r"compiles_nothing\[(cp, documents|pp, deferred weight gradients, LoRA|tp)\]",),
    "training/test_elastic_determinism": (
        r"at_any_dp_degree\[.*-ep: (2 of ddp-2|3 of zero2-3|2 of zero1-4|cp|cp x zero3|pp)\]",
    ),
    "training/test_memory_recovery": (r"keeps_the_losses\[(zero-1-True|zero-3-False)",),
    "training/test_options": (r"recompute_keeps_the_losses\[layout0",),
}


def is_extended(file: str, test_name: str) -> bool:
    """Return whether a test runs only with --extended. `file`: as in EXTENDED_CASES; `test_name`: with parameters."""
    return any(re.search(pattern, test_name) for pattern in EXTENDED_CASES.get(file, ()))


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
