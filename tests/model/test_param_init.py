import math
import threading
import weakref

import pytest
import torch
from torch import Tensor

from raytrain_hpc.errors import ModelError
from raytrain_hpc.model import param_init
from raytrain_hpc.model.decoder import Decoder
from raytrain_hpc.model.param_init import count_init_threads, init_tensor, init_tensors, init_weights


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_weights_have_the_standard_deviation_of_their_kind(tiny, family: str):
    spec = tiny(family, hidden_size=128, num_layers=3, init_std=0.03, ffn_size=256)
    decoder = Decoder(spec)
    init_weights(decoder, seed=0)
    for name, parameter in decoder.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            residual = name.endswith(("out.weight", "down.weight"))
            std = 0.03 / math.sqrt(6) if residual else 0.03
            error = std / math.sqrt(
                2 * parameter.numel()
            )  # standard error of a standard deviation estimated from n numbers
            assert parameter.std().item() == pytest.approx(std, abs=4.5 * error), name
            assert abs(parameter.mean().item()) < 4.5 * std / math.sqrt(parameter.numel()), name


def test_initial_values_do_not_depend_on_the_order(tiny):
    spec = tiny("llama")
    decoder = Decoder(spec)
    sizes = {name: parameter.shape for name, parameter in decoder.named_parameters()}
    forward = {name: init_tensor(spec, name, size, 5) for name, size in sizes.items()}
    torch.manual_seed(99)
    backward = {name: init_tensor(spec, name, size, 5) for name, size in reversed(sizes.items())}
    init_weights(decoder, 5)
    for name, parameter in decoder.named_parameters():
        assert torch.equal(forward[name], backward[name])
        assert torch.equal(forward[name], parameter)


def test_layers_and_seeds_differ(tiny):
    spec = tiny("llama")
    first = init_tensor(spec, "layers.0.mlp.up.weight", (32, 32), 0)
    assert not torch.equal(first, init_tensor(spec, "layers.1.mlp.up.weight", (32, 32), 0))
    assert not torch.equal(first, init_tensor(spec, "layers.0.mlp.up.weight", (32, 32), 1))


def test_initial_values_do_not_depend_on_meta_device_or_dtype(tiny):
    spec = tiny("llama")
    plain = Decoder(spec)
    init_weights(plain, 3)
    with torch.device("meta"):
        wide = Decoder(spec).double()
    wide.to_empty(device="cpu")
    init_weights(wide, 3)
    for a, b in zip(plain.parameters(), wide.parameters(), strict=True):
        assert torch.equal(a.double(), b)
    tokens = torch.arange(10).view(1, 10)
    torch.testing.assert_close(plain(tokens).double(), wide(tokens), rtol=1e-4, atol=1e-5)


def test_an_unknown_parameter_is_refused(tiny):
    with pytest.raises(ModelError, match=r"layers.0.router.gates: no initial value"):
        init_tensor(tiny("llama"), "layers.0.router.gates", (4, 4), 0)


SIZES = {
    f"{kind} {number}": torch.Size([512, 512 + number] if kind == "large" else [16])
    for number in range(6)
    for kind in ("small", "large")
}
ORDER = [f"large {number}" for number in reversed(range(6))] + [f"small {number}" for number in range(6)]


def test_threads_keep_the_bits_of_a_model(tiny):
    """The reference draws each tensor by itself."""
    spec = tiny("llama", hidden_size=256, num_heads=4, ffn_size=1024, vocab_size=1024)
    decoder = Decoder(spec)
    sizes = {name: parameter.shape for name, parameter in decoder.named_parameters()}
    assert sum(size.numel() >= 512 * 512 for size in sizes.values()) > 3
    init_weights(decoder, 5, num_threads=3)
    for name, parameter in decoder.named_parameters():
        assert torch.equal(parameter, init_tensor(spec, name, sizes[name], 5)), name


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_large_tensors_come_first_and_are_bounded_in_number(num_threads: int):
    """`num_threads` large tensors are drawn at the same time, and no more are in memory. Small ones use no thread."""
    caller, lock, is_drawn_together = threading.get_ident(), threading.Lock(), threading.Barrier(num_threads)
    drawing_threads: dict[str, int] = {}
    order = list(SIZES) if num_threads == 1 else ORDER
    first_names = [name for name in order if name.startswith("large")][:num_threads]
    copied, live, max_live = [], set(), 0

    def draw(name: str, size: torch.Size) -> Tensor:
        nonlocal max_live
        drawing_threads[name] = threading.get_ident()
        value = torch.empty(size)
        if len(size) == 2:
            with lock:
                live.add(name)
                max_live = max(max_live, len(live))
            weakref.finalize(value, live.discard, name)
            if name in first_names:
                is_drawn_together.wait(10)
        return value

    def copy(name: str, value: Tensor) -> None:
        assert threading.get_ident() == caller and value.shape == SIZES[name]
        copied.append(name)

    init_tensors(SIZES, draw, copy, num_threads)
    assert copied == order
    assert max_live == num_threads and not live
    callers = {name for name, thread in drawing_threads.items() if thread == caller}
    assert callers == {name for name, size in SIZES.items() if num_threads == 1 or len(size) == 1}


@pytest.mark.parametrize("failing", ["small 2", "large 2"])
def test_errors_of_a_thread_are_raised_unchanged(failing: str):
    error, copied = ModelError("of one tensor"), []

    def draw(name: str, size: torch.Size) -> str:
        if name == failing:
            raise error
        return name

    with pytest.raises(ModelError) as caught:
        init_tensors(SIZES, draw, lambda name, value: copied.append(value), num_threads=2)
    assert caught.value is error
    assert copied == ORDER[: ORDER.index(failing)]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("param-init")]


def test_small_models_start_no_thread(tiny):
    decoder, threads = Decoder(tiny("llama")), set()
    sizes = {name: parameter.shape for name, parameter in decoder.named_parameters()}
    init_tensors(sizes, lambda *_: threads.add(threading.get_ident()), lambda *_: None, 4)
    assert threads == {threading.get_ident()}


def test_processes_divide_the_cpus(monkeypatch):
    monkeypatch.setattr(param_init, "count_usable_cpus", lambda: 26)
    assert [count_init_threads(processes) for processes in (1, 4, 8, 26, 27)] == [8, 6, 3, 1, 1]
