"""Every private name of torch does what the package relies on, in the version of torch that is installed."""

from __future__ import annotations

import gc
import json
import time
import warnings
import weakref
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from raytrain_hpc import torch_private, torch_private_fsdp, torch_private_groups
from raytrain_hpc.distributed.process_groups import init_process_groups
from raytrain_hpc.parallel.blockwise_attention import BlockMask, attend, attend_backward
from raytrain_hpc.planner.layout import Layout
from tests.warm_pool import WarmPool

CPU = torch.device("cpu")


def test_foreach_operations_equal_those_of_each_tensor() -> None:
    tensors = [torch.arange(4.0), torch.full((2, 3), -2.0)]
    assert [float(norm) for norm in torch_private.foreach_norm(tensors)] == [float(x.norm()) for x in tensors]
    copies = [torch.zeros_like(x) for x in tensors]
    torch_private.foreach_copy_(copies, tensors)
    torch_private.foreach_mul_(copies, torch.tensor(3.0))
    assert all(torch.equal(copy, 3.0 * x) for copy, x in zip(copies, tensors, strict=True))


def test_the_float8_product_equals_that_of_its_rounded_operands() -> None:
    """On CPUs. `scaled_mm_op` is the operation that selective activation checkpointing sees."""
    torch.manual_seed(1)
    a, b = (torch.randn(rows, 32).to(torch.float8_e4m3fn) for rows in (16, 48))
    scales = torch.tensor(0.5), torch.tensor(4.0)
    product = torch_private.scaled_mm(a, b.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=True)
    assert torch.equal(product, (2 * (a.double() @ b.double().t())).bfloat16())
    assert torch.equal(product, torch_private.scaled_mm_op(a, b.t(), *scales, out_dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("loss", "is_mean"),
    [
        (lambda x, y: F.cross_entropy(x, y), True),
        (lambda x, y: F.mse_loss(x, torch.zeros(4, 3)), True),
        (lambda x, y: F.cross_entropy(x, y, reduction="none").mean(), True),
        (lambda x, y: F.cross_entropy(x, y, reduction="sum"), False),
        (lambda x, y: x.square().sum(0).mean(), False),  # over the columns
        (lambda x, y: F.cross_entropy(x, y) * 4, False),
        (lambda x, y: torch.tensor(1.0), False),
    ],
)
def test_autograd_tells_that_a_loss_is_a_mean(loss: Any, is_mean: bool) -> None:
    value = loss(torch.randn(4, 3, requires_grad=True), torch.tensor([0, 1, 2, 0]))
    assert torch_private.is_mean_over_rows(value, 4) == is_mean


def test_flash_attention_takes_rows_of_documents() -> None:
    """Its kernels need a GPU: tests/parallel/test_varlen_attention.py. These are the positional arguments."""
    forward, backward = (
        [argument.name for argument in op.default._schema.arguments if not argument.kwarg_only]
        for op in (torch_private.flash_attention, torch_private.flash_attention_backward)
    )
    shared = ["cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal"]
    assert forward == ["query", "key", "value", *shared, "return_debug_mask"]
    inputs = ["grad_out", "query", "key", "value", "out", "logsumexp"]
    assert backward == [*inputs, *shared, "rng_state", "unused"]


def test_the_grouped_product_multiplies_each_group_by_its_matrix() -> None:
    """`grouped_mm_op` is the operation that selective activation checkpointing sees."""
    torch.manual_seed(1)
    rows, matrices, ends = torch.randn(9, 8), torch.randn(3, 8, 4), torch.tensor([2, 2, 9], dtype=torch.int32)
    expected = torch.cat([rows[:2] @ matrices[0], rows[2:] @ matrices[2]])
    for grouped_mm in (torch_private.grouped_mm, torch_private.grouped_mm_op):
        torch.testing.assert_close(grouped_mm(rows, matrices, offs=ends), expected)


def test_attention_kernels_are_tried_in_the_order_that_was_set() -> None:
    q, k = torch.randn(1, 4, 16, 8), torch.randn(1, 2, 16, 8)
    default = torch._C._get_sdp_priority_order()  # type: ignore[attr-defined]
    try:
        torch_private.set_attention_kernel_order(["math", "flash"])
        assert torch._C._get_sdp_priority_order()[:2] == [0, 1]  # type: ignore[attr-defined]
    finally:
        torch._C._set_sdp_priority_order(default)  # type: ignore[attr-defined]
    assert torch_private.choose_attention_kernel(q, k) == torch_private.choose_attention_kernel(q, q) == "flash"
    assert torch_private.choose_attention_kernel(q.to(torch.float64).requires_grad_(), k.int()) == "math"


def test_the_version_of_a_tensor_grows_with_every_change_in_place() -> None:
    tensor = torch.zeros(4)
    version = torch_private.get_version(tensor)
    alias = tensor.detach()
    tensor[:2].add_(1)
    assert torch_private.get_version(alias) == torch_private.get_version(tensor) == version + 1


def test_an_unsafe_view_is_no_view_for_autograd() -> None:
    matrix = torch.arange(12.0).view(4, 3).clone()
    viewed = torch_private.unsafe_view(matrix, [2, 2, 3])
    assert not viewed._is_view() and viewed.data_ptr() == matrix.data_ptr() and viewed.shape == (2, 2, 3)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_functional_optimizers_equal_the_classes(name: str) -> None:
    weight, grad = torch.arange(1.0, 5.0), torch.full((4,), 0.5)
    parameter = nn.Parameter(weight.clone())
    parameter.grad = grad.clone()
    updated = [weight.clone()]
    if name == "adamw":
        torch.optim.AdamW([parameter], lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.01, fused=True).step()
        state = [[torch.zeros(4)], [torch.zeros(4)], [], [torch.tensor(1.0)]]
        options = {"beta1": 0.9, "beta2": 0.99, "lr": 0.1, "weight_decay": 0.01, "eps": 1e-8, "maximize": False}
        torch_private.fused_adamw_(updated, [grad], *state, amsgrad=False, **options)
    else:
        torch.optim.SGD([parameter], lr=0.1, weight_decay=0.01, foreach=True).step()
        options = {"momentum": 0.0, "lr": 0.1, "dampening": 0.0, "weight_decay": 0.01}
        torch_private.sgd(updated, [grad], [None], nesterov=False, maximize=False, foreach=True, **options)
    assert torch.equal(updated[0], parameter.detach()) and not torch.equal(updated[0], weight)


def test_the_attention_kernel_of_cpus_returns_the_log_sum_exp() -> None:
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    scores = (q @ k.transpose(-1, -2) / 2.0).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    expected = scores.softmax(-1) @ v
    out, lse = torch_private.sdpa_cpu(q.detach(), k.detach(), v.detach(), 0.0, True, attn_mask=None)
    torch.testing.assert_close(out, expected.detach())
    torch.testing.assert_close(lse, scores.logsumexp(-1).detach())
    grads = torch_private.sdpa_cpu_backward(
        torch.ones_like(out), q.detach(), k.detach(), v.detach(), out, lse, 0.0, True, attn_mask=None
    )
    for grad, wanted in zip(grads, torch.autograd.grad(expected.sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(grad, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_attention_kernels_of_gpus_take_and_return_these_arguments(dtype: torch.dtype) -> None:
    """On the meta device: bf16 uses the flash kernel, fp32 the memory-efficient one. Values are tested on GPUs."""
    q, k, v = (torch.empty(2, 4, 32, 16, dtype=dtype, device="meta") for _ in range(3))
    out, lse = attend(q, k, v, BlockMask(causal=True))
    assert out.shape == q.shape and lse.shape == q.shape[:3] and lse.dtype == torch.float32
    grads = attend_backward(torch.empty_like(out), q, k, v, out, lse, BlockMask(causal=True))
    assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]


def test_the_ops_of_scaled_dot_product_attention_are_the_ones_kept_by_selective_checkpointing() -> None:
    names = {op.default.name() for op in (torch_private.sdpa_flash, torch_private.sdpa_efficient)}
    assert names == {"aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_efficient_attention"}
    assert torch_private.sdpa_cudnn.default.name() == "aten::_scaled_dot_product_cudnn_attention"
    query = torch.randn(1, 2, 4, 8, requires_grad=True)
    with torch.profiler.profile() as profile:
        F.scaled_dot_product_attention(query, query, query, is_causal=True)
    assert torch_private.sdpa_cpu.default.name() in {event.name for event in profile.events()}


def test_profiler_ops_during_recomputation_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that emits one such op in its forward pass and two in recomputation, as FSDP2 inside a block does."""
    import torch.utils.checkpoint as implementation

    def block(x: Tensor) -> Tensor:
        calls.append(1)
        for _ in calls:
            with torch.profiler.record_function("all-gather"):
                pass
        return (x @ x).sin()

    def save_all(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE

    def run() -> Tensor:
        calls.clear()
        x = torch.full((2, 2), 0.5, requires_grad=True)
        context_fn = partial(create_selective_checkpoint_contexts, save_all)
        checkpoint(block, x, use_reentrant=False, context_fn=context_fn).sum().backward()
        assert x.grad is not None
        return x.grad

    calls: list[int] = []
    monkeypatch.setattr(implementation, "SAC_IGNORED_OPS", set(implementation.SAC_IGNORED_OPS))
    torch_private.ignore_profiler_ops_in_recomputation()
    assert torch.allclose(run(), torch.full((2, 2), 2.0 * torch.tensor(0.5).cos().item()))
    implementation.SAC_IGNORED_OPS.clear()
    with pytest.raises(RuntimeError):
        run()


def test_persistent_buffers_are_those_of_the_state_dict() -> None:
    module = nn.Module()
    module.register_buffer("kept", torch.zeros(1))
    module.register_buffer("derived", torch.zeros(1), persistent=False)
    persistent = {name for name, _ in module.named_buffers() if torch_private.is_persistent_buffer(module, name)}
    assert persistent == module.state_dict().keys() == {"kept"}


def record_all_reduce(rank: int, rendezvous: Any) -> tuple[dict[str, Any], list[float]]:
    """Return the flight record of an all-reduce, and its result after aborting the groups of accelerators only."""
    init_process_groups(rendezvous, rank, Layout(dp_replicate=2), CPU)
    assert [backend for backend, _ in dist.distributed_c10d._world.pg_map.values()] == ["gloo"]
    torch_private_groups.abort_accelerator_groups()
    value = torch.full((3,), float(rank + 1))
    dist.all_reduce(value)
    deadline = time.monotonic() + 30.0
    while not (entry := json.loads(torch_private_groups.dump_flight_recorder())["entries"][-1])["retired"]:
        assert time.monotonic() < deadline, "another thread retires entries soon after their end"
        time.sleep(0.01)
    return entry, value.tolist()


def test_the_flight_recorder_and_the_list_of_groups(pool: WarmPool) -> None:
    for entry, values in pool.call(record_all_reduce, 2):
        assert values == [3.0] * 3
        assert entry["profiling_name"] == "gloo:all_reduce" and entry["input_sizes"] == [[3]]
        assert not entry["is_p2p"] and entry["collective_seq_id"] > 0
        assert entry["process_group"][0] == "0" and entry["time_created_ns"] > 0


def test_nccl_groups_can_be_aborted_together() -> None:
    """The class that `nccl` names has group calls, or the process group coalesces. Needs a CUDA build, but no GPU."""
    names = [name for name in ("ProcessGroupNCCL2", "ProcessGroupNCCL") if hasattr(dist.distributed_c10d, name)]
    assert bool(names) is dist.is_nccl_available()
    for name in names:
        assert name == "ProcessGroupNCCL2" or hasattr(getattr(dist.distributed_c10d, name), "_group_start")
    assert hasattr(dist.ProcessGroup, "_start_coalescing") and hasattr(dist.ProcessGroup, "_end_coalescing")


def test_the_file_of_fsdp_collectives() -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    assert Path(torch_private_fsdp.get_fsdp_collectives_file()) == Path(_fsdp_collectives.__file__)


def add_deferred_gradient(rank: int, rendezvous: Any) -> list[float]:
    """Add a gradient to a sharded weight after a backward pass that reduced nothing; return the reduced gradient."""
    from torch.distributed.fsdp import fully_shard

    context = init_process_groups(rendezvous, rank, Layout(dp_shard=2, zero=3), CPU)
    assert context.mesh is not None
    layer = nn.Linear(2, 2, bias=False)
    fully_shard(layer, mesh=context.mesh)
    layer.set_gradient_divide_factor(1.0)
    layer.set_force_sum_reduction_for_comms(True)
    layer.set_requires_gradient_sync(False)
    layer.set_is_last_backward(False)
    layer.set_reshard_after_backward(False)
    layer(torch.full((1, 2), float(rank + 1))).sum().backward()
    assert layer.weight.grad is None or not isinstance(layer.weight.grad, torch.distributed.tensor.DTensor)
    torch_private_fsdp.run_fsdp_post_backward(layer)  # accumulates
    layer.weight.grad = torch.full((2, 2), 10.0) if layer.weight.grad is None else layer.weight.grad.add_(10.0)
    torch_private_fsdp.run_fsdp_post_backward(layer)
    layer.set_requires_gradient_sync(True)
    layer.set_is_last_backward(True)
    layer.set_reshard_after_backward(True)
    torch_private_fsdp.run_fsdp_post_backward(layer)
    torch_private_fsdp.end_fsdp_backward(layer)
    return layer.weight.grad.to_local().flatten().tolist()


def test_fsdp_reduces_gradients_that_were_added_after_the_backward_pass(pool: WarmPool) -> None:
    assert pool.call(add_deferred_gradient, 2) == [[1.0 + 2.0 + 2 * 10.0] * 2] * 2


class Choice(nn.Module):
    """Two layers of which one is used."""

    def __init__(self, index: int):
        super().__init__()
        self.layers, self._index = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)]), index

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers[self._index](x)


def reduce_unused(rank: int, rendezvous: Any) -> tuple[list[float], list[float], list[bool]]:
    """Use one of two sharded layers on each rank; return both reduced gradients, and which were used on this rank."""
    from torch.distributed.fsdp import fully_shard

    context = init_process_groups(rendezvous, rank, Layout(dp_shard=2, zero=3), CPU)
    assert context.mesh is not None
    layers = Choice(rank)
    fully_shard(layers, mesh=context.mesh)
    layers.set_gradient_divide_factor(1.0)
    layers.set_force_sum_reduction_for_comms(True)
    used = set[nn.Parameter]()
    parameters = torch_private_fsdp.on_fsdp_post_backward(layers, used.add)
    layers(torch.full((1, 2), float(rank + 1))).sum().backward()
    gradients = [parameter.grad.to_local().flatten().tolist() for parameter in parameters]
    return gradients[0], gradients[1], [parameter in used for parameter in parameters]


def test_fsdp_reduces_zeros_for_what_a_rank_does_not_use(pool: WarmPool) -> None:
    gradients = [1.0] * 2, [2.0] * 2
    assert pool.call(reduce_unused, 2) == [(*gradients, [True, False]), (*gradients, [False, True])]


def count_rows_after_forward(rank: int, rendezvous: Any) -> tuple[int, int]:
    """Return the rows of a sharded weight that a rank has before and after a forward pass."""
    from torch.distributed.fsdp import fully_shard

    context = init_process_groups(rendezvous, rank, Layout(dp_shard=4, zero=3), CPU)
    assert context.mesh is not None
    layer = nn.Linear(2, 8, bias=False)
    model = nn.Sequential(layer)
    with torch_private_fsdp.reshard_over_inner_dimension(DeviceMesh("cpu", context.mesh.mesh.view(2, 2))):
        for module in (layer, model):
            fully_shard(module, mesh=context.mesh)
    before = layer.weight.to_local().shape[0]
    model(torch.ones(1, 2))
    return before, layer.weight.to_local().shape[0]


def test_weights_stay_sharded_over_fewer_ranks_after_the_forward_pass(pool: WarmPool) -> None:
    assert pool.call(count_rows_after_forward, 4) == [(2, 4)] * 4


def list_shards(rank: int, rendezvous: Any) -> list[tuple[bool, str, int]]:
    """Return the shards of the outer one of two FSDP2 modules: whether it is the owner, their names and sizes."""
    from torch.distributed.fsdp import fully_shard

    context = init_process_groups(rendezvous, rank, Layout(dp_shard=2, zero=3), CPU)
    assert context.mesh is not None
    outer = nn.Sequential(nn.Linear(4, 3), nn.Linear(2, 2))
    for module in (outer[1], outer):
        fully_shard(module, mesh=context.mesh)
    shards = torch_private_fsdp.list_fsdp_shards(outer)
    return [(owner is outer[0], name, shape.numel()) for owner, name, shape in shards]


def test_fsdp_gathers_padded_shards_in_this_order(pool: WarmPool) -> None:
    assert pool.call(list_shards, 2) == [[(True, "weight", 2 * 4), (True, "bias", 2)]] * 2


def locate_shards(rank: int, rendezvous: Any) -> tuple[Any, Any, bool]:
    """Return the boxes of a shard and of a strided shard, and whether a mesh is freed once DTensor's caches are."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    context = init_process_groups(rendezvous, rank, Layout(dp_shard=2, zero=3), CPU)
    assert context.mesh is not None and torch_private.get_split_factor(Shard(0)) == 1
    assert torch_private.get_split_factor(_StridedShard(0, split_factor=2)) == 2
    box = torch_private.compute_local_box((5, 3), context.mesh, [Shard(0)])
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("rows",))
    tensor = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    product = tensor.redistribute(placements=[Replicate()]) * 2.0
    assert torch.equal(product.to_local(), torch.full((4, 4), 2.0)) and tensor.to_local().shape == (2, 4)
    reference = weakref.ref(mesh)
    del mesh, tensor, product
    torch_private.clear_dtensor_caches()
    gc.collect()
    strided = [_StridedShard(0, split_factor=1)]
    return box, torch_private.compute_local_box((4, 2), context.mesh, strided), reference() is None


def test_boxes_of_dtensors_and_their_caches(pool: WarmPool) -> None:
    results = pool.call(locate_shards, 2)
    assert [box for box, _, _ in results] == [((3, 3), (0, 0)), ((2, 3), (3, 0))]
    assert [box for _, box, _ in results] == [((2, 2), (0, 0)), ((2, 2), (2, 0))]
    assert [is_freed for _, _, is_freed in results] == [True, True]


@pytest.mark.filterwarnings("error")
def test_storages_say_whether_they_are_shared() -> None:
    for tensor, expected in ((torch.zeros(3), False), (torch.zeros(3).share_memory_()[1:], True)):
        with warnings.catch_warnings(action="ignore"):
            storages = [tensor.untyped_storage(), tensor.storage()]
        assert [torch_private.is_storage_shared(storage) for storage in storages] == [expected, expected]


def gather_alone(rank: int, rendezvous: Any) -> tuple[int, int, list[float], bool]:
    """Return rank and size of a subgroup of a fake group, what an all-gather returns, and whether a group is left."""
    torch_private.init_fake_process_group(5, 8)
    mesh = DeviceMesh("cpu", torch.arange(8).view(4, 2), mesh_dim_names=("rows", "columns"))
    group = mesh["rows"].get_group()
    gathered = [torch.zeros(1) for _ in range(4)]
    dist.all_gather(gathered, torch.ones(1), group=group)
    dist.irecv(torch.zeros(1), 3).wait()
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    dist.destroy_process_group()
    return rank, size, [float(part) for part in gathered], dist.is_initialized()


def test_a_fake_group_has_ranks_that_do_not_exist(pool: WarmPool) -> None:
    assert pool.call(gather_alone, 1) == [(2, 4, [1.0] * 4, False)]


def count_versions(rank: int, rendezvous: Any) -> list[list[int]]:
    """Return the number of compiled versions of a function after each call."""
    from torch._dynamo import config
    from torch._dynamo.testing import CompileCounter

    def count(forgets: bool, raised: int) -> list[int]:
        torch.compiler.reset()
        torch_private.forget_compiled_sizes()
        counter, counts = CompileCounter(), []
        double = torch.compile(lambda x: x * 2.0, backend=counter)
        with config.patch(recompile_limit=2, accumulated_recompile_limit=2):
            torch_private.raise_recompile_limits(raised)
            for size in (3, 4, 5):
                assert torch.equal(double(torch.ones(size)), torch.full((size,), 2.0))
                counts.append(counter.frame_count)
                if forgets:
                    torch_private.forget_compiled_sizes()
        return counts

    return [count(forgets=False, raised=0), count(forgets=True, raised=0), count(forgets=True, raised=1)]


def test_versions_of_compiled_functions(pool: WarmPool) -> None:
    """The second size makes it a variable, unless the first one is forgotten; no version comes after the limit."""
    assert pool.call(count_versions, 1) == [[[1, 2, 2], [1, 2, 2], [1, 2, 3]]]


def test_groups_are_reconfigured_with_handles() -> None:
    """Only torch 2.14 and later can."""
    assert torch_private_groups.has_reconfigure() == (torch.__version__ >= "2.14")
    if torch_private_groups.has_reconfigure():
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1, enable_reconfigure=True)
        try:
            for number in (1, 2):
                torch_private_groups.reconfigure(
                    number, [torch_private_groups.get_reconfigure_handle()], timedelta(seconds=20)
                )
                total = torch.ones(2)
                dist.all_reduce(total)
                assert total.tolist() == [1.0, 1.0]
        finally:
            dist.destroy_process_group()


def test_a_kernel_that_only_counts_the_clock() -> None:
    assert callable(torch.cuda._sleep)
    if torch.cuda.is_available():
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch_private.sleep_on_device(10_000_000)
        end.record()
        torch.cuda.synchronize()
        assert begin.elapsed_time(end) > 1.0
