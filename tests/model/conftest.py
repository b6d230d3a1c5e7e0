from collections.abc import Callable

import pytest
import torch

from raytrain_hpc.config.model_spec import ModelSpec, resolve_model_spec
from raytrain_hpc.config.schema import ModelConfig
from raytrain_hpc.model.decoder import Decoder

GPT2 = {"norm": "layernorm", "activation": "gelu", "position_embedding": "learned", "bias": True}
LLAMA = {
    "norm": "rmsnorm",
    "activation": "swiglu",
    "position_embedding": "rotary",
    "num_kv_heads": 2,
    "tie_embeddings": False,
}
TINY = {"hidden_size": 32, "num_layers": 2, "num_heads": 4}


@pytest.fixture(autouse=True)
def one_thread():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def tiny() -> Callable[..., ModelSpec]:
    """A factory of tiny model specs: by family ("gpt2", "llama"), with model settings on top."""

    def make(family: str, **keys: object) -> ModelSpec:
        config = ModelConfig(**{**TINY, **(GPT2 if family == "gpt2" else LLAMA), **keys})
        return resolve_model_spec(config, vocab_size=19, seq_len=12)

    return make


@pytest.fixture
def random_decoder() -> Callable[..., Decoder]:
    """A factory of decoders with random parameters, norms and biases included, so that ignoring one is noticed."""

    def make(spec: ModelSpec, dtype: torch.dtype = torch.float64) -> Decoder:
        torch.manual_seed(0)
        decoder = Decoder(spec).to(dtype)
        with torch.no_grad():
            for name, parameter in decoder.named_parameters():
                parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.3)
        return decoder

    return make
