"""All private or undocumented names of torch that the package uses: why, and which versions have them.

Those of process groups are in torch_private_groups.py, those of FSDP2 in torch_private_fsdp.py. No other file may use
one; tests/architecture checks that. Every name has a test in tests/test_torch_private.py, to be run with a new version
of torch before the range in pyproject.toml is widened. "All versions" means 2.11 to 2.15.

FSDP2 and DTensor are imported when a function needs them: they take 40 MiB in workers that use neither.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.sgd import sgd as sgd  # an undocumented function: the classes load TorchDynamo; all versions

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

# One kernel for a list of tensors instead of one per tensor. All versions.
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_sub = torch._foreach_sub

# AdamW of a list of tensors of one dtype, in one call; the class loads TorchDynamo and counts steps per tensor. All
# versions.
fused_adamw_ = torch._fused_adamw_

# Attention kernels that return the log-sum-exp and, given one, compute gradients; `scaled_dot_product_attention` drops
# it. Their outputs are also what selective activation checkpointing keeps. All versions.
_aten: Any = torch.ops.aten
sdpa_cpu = _aten._scaled_dot_product_flash_attention_for_cpu
sdpa_cpu_backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
sdpa_flash = _aten._scaled_dot_product_flash_attention
sdpa_flash_backward = _aten._scaled_dot_product_flash_attention_backward
sdpa_efficient = _aten._scaled_dot_product_efficient_attention
sdpa_efficient_backward = _aten._scaled_dot_product_efficient_attention_backward
sdpa_cudnn = _aten._scaled_dot_product_cudnn_attention
# FlashAttention over rows of documents. The public `torch.nn.attention.varlen` has no grouped key-value heads in 2.11,
# and is a prototype. All versions; later ones have more keyword arguments.
flash_attention = _aten._flash_attention_forward
flash_attention_backward = _aten._flash_attention_backward

# A product of two float8 matrices with one scale each: [m, k] and the transpose of [n, k]. The public
# `torch.nn.functional.scaled_mm` takes the same operands, but not in 2.11. All versions.
scaled_mm = torch._scaled_mm
scaled_mm_op = _aten._scaled_mm.default
# Products of groups of rows with one matrix each in one kernel; `offs`: where each group ends. The public
# `torch.nn.functional.grouped_mm` is the same, but not in 2.11. All versions.
grouped_mm = torch._grouped_mm
grouped_mm_op = _aten._grouped_mm.default
# A view that autograd does not take for one, as `F.linear` returns. FSDP2 warns about others. All versions.
unsafe_view = _aten._unsafe_view.default


def ignore_profiler_ops_in_recomputation() -> None:
    """Make selective activation checkpointing ignore profiler ops, process-wide.

    FSDP2 modules inside a block emit them around all-gathers, and more of them during recomputation, which torch would
    take for another forward pass. `SAC_IGNORED_OPS` and the ops: all versions.
    """
    from torch.utils.checkpoint import SAC_IGNORED_OPS

    profiler = torch.ops.profiler
    SAC_IGNORED_OPS.update(
        (profiler._record_function_enter_new.default, profiler._record_function_exit._RecordFunction)
    )


def get_version(tensor: torch.Tensor) -> int:
    """Return a number that grows with each change of a tensor in place, also through its views and `detach`.

    Autograd refuses saved tensors that have changed, but not those that saved-tensor hooks return. `_version`: all
    versions.
    """
    return int(tensor._version)


def is_persistent_buffer(module: nn.Module, name: str) -> bool:
    """Return whether a buffer that is registered on `module` itself is part of its state dict.

    `register_buffer` needs it to register a copy in the same way. `_non_persistent_buffers_set`: all versions.
    """
    return name not in module._non_persistent_buffers_set


def set_attention_kernel_order(names: Sequence[str]) -> None:
    """Set the order in which `scaled_dot_product_attention` tries its kernels, process-wide, by lower-case names.

    The public `torch.nn.attention.sdpa_kernel` sets it for a context, and passes are recomputed outside of contexts.
    `_set_sdp_priority_order`: all versions.
    """
    backends = [_get_attention_backend(name) for name in names]
    torch._C._set_sdp_priority_order([int(backend) for backend in backends])  # type: ignore[attr-defined]


def choose_attention_kernel(q: torch.Tensor, k: torch.Tensor) -> str:
    """Return the name of the kernel of causal attention, without a mask, for such queries and keys.

    q: [b, heads, t, head_dim]; k: [b, kv_heads, t, head_dim]. `_fused_sdp_choice`: all versions.
    """
    is_grouped = q.shape[1] != k.shape[1]
    chosen = torch._fused_sdp_choice(q, k, k, None, 0.0, True, enable_gqa=is_grouped)
    names = ("cudnn", "flash", "efficient", "math")
    return next((name for name in names if int(_get_attention_backend(name)) == chosen), f"number {chosen}")


def _get_attention_backend(name: str) -> Any:
    from torch.nn.attention import SDPBackend

    return SDPBackend.MATH if name == "math" else getattr(SDPBackend, f"{name.upper()}_ATTENTION")


def compute_local_box(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (sizes, offsets) of this rank's part of a DTensor. `compute_local_shape_and_global_offset`: all versions.

    The public `DTensor` has no offsets, and strided shards (FSDP2 over tensor parallelism) are hard to compute.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(tuple(shape), mesh, placements)
    return tuple(sizes), tuple(offsets)


def get_split_factor(placement: Placement) -> int:
    """Return the split factor of a strided shard, 1 for others. `_StridedShard.split_factor`: all versions."""
    return int(getattr(placement, "split_factor", 1))


def clear_dtensor_caches() -> None:
    """Clear DTensor's caches of operation results, if DTensor is in use. They are keyed by meshes or by their ranks.

    The cached results hold references to the groups of a mesh, whose connections stay open until they are gone. In
    addition, a later mesh of the same ranks, in which this process has another rank, would get parameters with the old
    mesh and the old rank. There is no public function. All versions have all of these caches; in 2.11, reductions and
    matrix products of DTensors, which the package does not use, keep references elsewhere too.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor, _collective_utils, _redistribute
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()  # type: ignore[no-untyped-call]
    torch._C._clear_DTensor_sharding_propagator_cache()
    ShardingPropagator._propagate_tensor_meta_cached.cache_clear()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()


def init_fake_process_group(rank: int, world_size: int) -> None:
    """Make a group of `world_size` ranks the default group, of which this process is `rank` and no other one exists.

    Its collectives return at once. A gather returns this rank's part for every rank, an all-reduce its input; the
    results of all others are uninitialized. Backend "fake" and `FakeStore`: all versions.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)  # type: ignore[no-untyped-call]


def forget_compiled_sizes() -> None:
    """Make the compiler forget the sizes that it has seen. Compiled code stays.

    Otherwise a size or number that differs in the next compilation becomes a variable of the graph.
    `torch._dynamo.pgo.reset_code_state`: all versions.
    """
    from torch._dynamo.pgo import reset_code_state

    reset_code_state()


def raise_recompile_limits(count: int) -> None:
    """Let the compiler keep `count` more versions of a function. Past its limit it runs the function uncompiled.

    `torch._dynamo.config.recompile_limit` and `accumulated_recompile_limit`: all versions.
    """
    from torch._dynamo import config

    config.recompile_limit += count
    config.accumulated_recompile_limit += count


def has_memory_history(device: torch.device) -> bool:
    """Return whether torch can record the allocations on a device: on GPUs, of Intel from 2.12 on."""
    memory = getattr(torch.get_device_module(device), "memory", None)
    return hasattr(memory, "_record_memory_history")


def record_memory_history(device: torch.device, max_entries: int | None) -> None:
    """Record allocations of GPU memory with their stacks, the newest `max_entries`; None: stop.

    `_record_memory_history`: where `has_memory_history`.
    """
    memory: Any = torch.get_device_module(device).memory
    if max_entries is None:
        memory._record_memory_history(enabled=None)
    else:
        memory._record_memory_history(max_entries=max_entries)


def dump_memory_snapshot(device: torch.device, path: str) -> None:
    """Write what `record_memory_history` has recorded, as a pickle for torch's memory viewer.

    `_dump_snapshot`: where `has_memory_history`.
    """
    memory: Any = torch.get_device_module(device).memory
    memory._dump_snapshot(path)


def is_storage_shared(storage: Any) -> bool:
    """Return whether the memory of a tensor on the CPU is shared between processes.

    `storage`: an UntypedStorage, or the TypedStorage that tensors are pickled with. Its public `is_shared` warns.
    `_untyped_storage`: all versions.
    """
    untyped = getattr(storage, "_untyped_storage", storage)
    return bool(untyped.device.type == "cpu" and untyped.is_shared())


def list_dcp_classes() -> dict[tuple[str, str], str]:
    """Return the classes in the `.metadata` of a distributed checkpoint: (module, name) -> name in current versions.

    Some are private, and older versions had two of them in a private module: all versions from 2.0 on. The modules are
    not imported.
    """
    metadata, storage = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
    sharded_tensor = "torch.distributed._shard.sharded_tensor.metadata"
    names = "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties MetadataIndex"
    classes = {(metadata, name): name for name in (*names.split(), "StorageMeta", "_MEM_FORMAT_ENCODING")}
    return classes | {
        (storage, "_StorageInfo"): "_StorageInfo",
        (sharded_tensor, "TensorProperties"): "TensorProperties",
        (sharded_tensor, "MEM_FORMAT_ENCODING"): "_MEM_FORMAT_ENCODING",
    }


def sleep_on_device(cycles: int) -> None:
    """Start a kernel on the current GPU that only counts its clock, to inject a hang. `_sleep`: all versions."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def load_dynamo() -> None:
    """Import TorchDynamo, which takes a second. The first DTensor of a process, or recomputed block, would.

    All versions.
    """
    import torch._dynamo  # noqa: F401


def load_symbolic_shapes() -> None:
    """Import SymPy, which takes half a second and which the first backward pass from given gradients loads.

    `torch.autograd._make_grads` does. All versions.
    """
    import torch.fx.experimental.symbolic_shapes  # noqa: F401


def is_mean_over_rows(loss: Tensor, num_rows: int) -> bool:
    """Return whether the last operation of a loss is a mean of a tensor with `num_rows` rows.

    Autograd keeps the sizes that a mean has reduced, and the reduction of a loss function of torch (1: mean), in
    attributes that its notes mention without listing them. Without them, the answer is no. All versions.
    """
    node: Any = loss.grad_fn
    sizes = getattr(node, "_saved_self_sym_sizes", ()) if node is not None and node.name() == "MeanBackward0" else ()
    return getattr(node, "_saved_reduction", 0) == 1 or (num_rows > 1 and tuple(sizes[:1]) == (num_rows,))
