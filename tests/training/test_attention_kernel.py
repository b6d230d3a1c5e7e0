"""The choice of the attention kernel of a GPU, with a stand-in for the GPU, and its line in the log."""

from __future__ import annotations

import logging

import pytest
import torch

from raytrain_hpc.config.model_spec import resolve_model_spec
from raytrain_hpc.training import attention_kernel
from raytrain_hpc.training.attention_kernel import configure_attention, log_attention_kernel
from tests.warm_pool import make_small_config


@pytest.mark.parametrize("uses_mask", [False, True])
@pytest.mark.parametrize(
    ("has_flash_3", "capability", "first"), [(False, 9, "cudnn"), (True, 9, "flash"), (True, 8, "cudnn")]
)
def test_cudnn_is_first_but_never_gets_a_mask(
    monkeypatch: pytest.MonkeyPatch, uses_mask: bool, has_flash_3: bool, capability: int, first: str
) -> None:
    order: list[str] = []
    enabled: list[bool] = []
    activated: list[str] = []
    monkeypatch.setattr(attention_kernel, "set_attention_kernel_order", order.extend)
    monkeypatch.setattr(attention_kernel, "find_spec", lambda name: object() if has_flash_3 else None)
    monkeypatch.setattr(attention_kernel.attention, "activate_flash_attention_impl", activated.append)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", enabled.append)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    configure_attention(torch.device("cuda", 0), uses_mask=uses_mask)
    assert order[0] == first and sorted(order) == ["cudnn", "efficient", "flash", "math"]
    assert enabled == [not uses_mask] and activated == (["FA3"] if first == "flash" else [])


def test_the_kernel_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    config = make_small_config(None, "train.dtype=fp32")
    spec = resolve_model_spec(config.model, vocab_size=64, seq_len=config.train.seq_len)
    with caplog.at_level(logging.INFO):
        log_attention_kernel(spec, config.train, torch.device("cpu"))
    assert caplog.messages == ["attention kernel: flash"]
