"""Text form of the state of a user's stream: JSON, in which no value can execute code when it is read.

Numbers, text, booleans, None and lists are themselves; every other value is an object with one key, its type. Equal
values have equal text, so that ranks can be compared.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raytrain_hpc.errors import DataError


def encode_state(state: Any) -> str:
    """Return the text of a state. Raises DataError for a value of another type, with its path in the state."""
    return json.dumps(_encode(state, "state_dict()"), separators=(",", ":"))


def decode_state(text: str) -> Any:
    """Return the state with this text."""
    return _decode(json.loads(text))


def _encode(value: Any, path: str) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return _encode_items(value, path)
    if type(value) is tuple:
        return {"tuple": _encode_items(value, path)}
    if isinstance(value, dict):
        items = value.items()
        return {"dict": [[_encode(key, path), _encode(entry, f"{path}[{key!r}]")] for key, entry in items]}
    if type(value) in (set, frozenset):
        return {type(value).__name__: sorted(_encode_items(list(value), path), key=json.dumps)}
    if type(value) in (bytes, bytearray):
        return {type(value).__name__: base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        array = np.ascontiguousarray(value)
        return {"scalar" if isinstance(value, np.generic) else "array": [array.dtype.str, *_encode_array(value, array)]}
    if type(value) is Tensor:
        tensor = value.detach().cpu().contiguous()
        data = tensor.reshape(-1).view(torch.uint8).numpy()
        return {"tensor": [str(tensor.dtype).removeprefix("torch."), *_encode_array(tensor, data)]}
    raise DataError(
        f"dataset: {path} is {type(value).__name__}, which the state of a stream cannot hold; use numbers, text, "
        "bytes, arrays, tensors, and lists, tuples, sets and dicts of these"
    )


def _encode_items(items: Any, path: str) -> list[Any]:
    return [_encode(item, f"{path}[{index}]") for index, item in enumerate(items)]


def _encode_array(value: Any, data: np.ndarray[Any, Any]) -> list[Any]:
    return [list(value.shape), base64.b64encode(data.tobytes()).decode()]


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    ((kind, content),) = value.items()
    return _DECODERS[kind](content)


def _decode_array(content: Any) -> np.ndarray[Any, Any]:
    dtype, shape, data = content
    return np.frombuffer(base64.b64decode(data), dtype=np.dtype(dtype)).reshape(shape).copy()


def _decode_tensor(content: Any) -> Tensor:
    dtype, shape, data = content
    buffer = bytearray(base64.b64decode(data))
    flat = torch.frombuffer(buffer, dtype=torch.uint8) if buffer else torch.empty(0, dtype=torch.uint8)
    return flat.view(getattr(torch, dtype)).reshape(shape)


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "tuple": lambda items: tuple(_decode(items)),
    "dict": lambda items: {_decode(key): _decode(entry) for key, entry in items},
    "set": lambda items: set(_decode(items)),
    "frozenset": lambda items: frozenset(_decode(items)),
    "bytes": base64.b64decode,
    "bytearray": lambda text: bytearray(base64.b64decode(text)),
    "array": _decode_array,
    "scalar": lambda content: _decode_array(content)[()],
    "tensor": _decode_tensor,
}
