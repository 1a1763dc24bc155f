"""Named tensors as safetensors files, and any other state as such a file and JSON.

Written here and not with safetensors' own writer or torch.distributed.checkpoint's, since both
hold Python's lock while they work: the training loop would stand still as long (docs/faults.md has
the figures). What is read back is read with safetensors itself, which checks all that it is given.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raytrain.errors import RaytrainError

_CHUNK_BYTES = 8 << 20
_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
FileParts = tuple[bytes, NDArray[np.uint8]]
"""A safetensors file: its header, and all its numbers as bytes."""
_Signature = tuple[tuple[str, torch.dtype, torch.Size], ...]


class HostTensors:
    """A copy of named tensors in one piece of host memory, as a safetensors file has them.

    The memory is kept from one copy to the next, because fresh memory costs several times the
    copying. For tensors on a GPU it is pinned.
    """

    def __init__(self) -> None:
        self._signature: _Signature = ()
        self._header = b""
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._places: dict[str, Tensor] = {}

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors; those on a GPU are there when the device's work so far is done.

        Raises:
            RaytrainError: a safetensors file can't hold one of these.
        """
        signature = tuple((name, t.dtype, t.shape) for name, t in tensors.items())
        if signature != self._signature:
            self._lay_out(tensors)
            self._signature = signature
        for name, tensor in tensors.items():
            self._places[name].copy_(tensor.detach(), non_blocking=True)

    @property
    def parts(self) -> FileParts:
        """What was copied as the parts of its file; the next copy changes them."""
        return self._header, self._memory.numpy()

    def _lay_out(self, tensors: Mapping[str, Tensor]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        # large numbers first, so that each tensor begins at a multiple of its numbers' size
        for name, t in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
            if t.dtype not in _NAMES or t.layout != torch.strided:
                raise RaytrainError(
                    f"a checkpoint can't hold {name}: it is a {t.layout} tensor of {t.dtype}"
                )
            begin, end = end, end + t.numel() * t.element_size()
            header[name] = {
                "dtype": _NAMES[t.dtype],
                "shape": list(t.shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._header = len(text).to_bytes(8, "little") + text
        pinned = any(t.device.type == "cuda" for t in tensors.values())
        self._memory = torch.empty(end, dtype=torch.uint8, pin_memory=pinned)
        self._places = {
            name: self._memory[slice(*header[name]["data_offsets"])].view(t.dtype).view(t.shape)
            for name, t in tensors.items()
        }


def write_parts(parts: FileParts, path: Path) -> str:
    """Write a file, down to the disk; gives its SHA-256.

    Raises:
        OSError: the storage doesn't take it.
    """
    digest = hashlib.sha256()
    with path.open("wb", buffering=0) as file:
        for part in (memoryview(parts[0]), parts[1].data):
            for begin in range(0, len(part), _CHUNK_BYTES):
                chunk = part[begin : begin + _CHUNK_BYTES]
                digest.update(chunk)
                _write_all(file.fileno(), chunk)
        os.fsync(file.fileno())
    return digest.hexdigest()


def split_state(state: object, path: str = "") -> tuple[dict[str, Tensor], Any]:
    """Nested dicts, lists and tuples of tensors and plain values -> (tensors, JSON of the rest).

    Args:
        state: such as an optimizer's state dict.
        path: name of the whole; a tensor's name is its keys joined with dots.

    Raises:
        RaytrainError: something in it is neither a tensor nor plain.
    """
    if isinstance(state, Tensor):
        return {path: state}, {"tensor": path}
    if state is None or isinstance(state, bool | int | str):
        return {}, state
    if isinstance(state, float):
        return {}, state if math.isfinite(state) else {"float": str(state)}
    kind = "dict" if isinstance(state, Mapping) else type(state).__name__
    if kind not in ("dict", "list", "tuple"):
        raise RaytrainError(
            f"a checkpoint can't hold {path}: it is a {kind}; an optimizer's state must be of "
            "tensors, numbers, strings, lists, tuples and dicts"
        )
    items = dict(state) if isinstance(state, Mapping) else dict(enumerate(cast("list[Any]", state)))
    tensors: dict[str, Tensor] = {}
    parts = []
    for key, value in items.items():
        inner, part = split_state(value, f"{path}.{key}" if path else str(key))
        tensors |= inner
        parts.append([key, part] if kind == "dict" else part)
    return tensors, {kind: parts}


def join_state(tensors: Mapping[str, Tensor], rest: Any) -> Any:
    """What ``split_state`` was given.

    Raises:
        KeyError, ValueError: ``rest`` isn't from there, or a tensor is missing.
    """
    if not isinstance(rest, dict):
        return rest
    [(kind, value)] = rest.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "float":
        return float(value)
    if kind == "dict":
        return {key: join_state(tensors, part) for key, part in value}
    parts = [join_state(tensors, part) for part in value]
    return {"list": list, "tuple": tuple}[kind](parts)


def _write_all(descriptor: int, chunk: memoryview) -> None:
    while chunk:
        chunk = chunk[os.write(descriptor, chunk) :]
