"""Decoding with NVIDIA DALI, on the CPU or on the worker's GPU. An optional extra.

The windows are fed in like the files, so DALI draws nothing by itself. One pipeline serves every
image size. Its resizing filter is torchvision's: a triangle as wide as the shrinking asks for.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from raytrain.data.augment import Windows
from raytrain.data.decode import DamagedImageError, Pixels
from raytrain.errors import RaytrainError

_BATCH = 64  # images in one run of a pipeline


def dali_installed() -> bool:
    """Whether DALI is there, without the second that importing it takes."""
    return find_spec("nvidia") is not None and find_spec("nvidia.dali") is not None


@dataclass(frozen=True)
class DaliDecoder:
    """DALI, with a pipeline of one DALI thread for each thread that calls it.

    Attributes:
        gpu: number of the GPU that decodes; None for the CPU. From a GPU the pixels come back to
            host memory, so that nothing after a decoder need know where it ran.

    Raises:
        RaytrainError: DALI isn't installed.
    """

    gpu: int | None = None

    reads: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not dali_installed():
            raise RaytrainError(
                f"input.decoder: {self.name} needs NVIDIA DALI, which isn't installed; "
                "pip install nvidia-dali-cuda130 (or -cuda120), or choose cpu"
            )

    @property
    def name(self) -> str:
        """What a recipe calls it."""
        return "dali_cpu" if self.gpu is None else "dali_gpu"

    @property
    def in_worker(self) -> bool:
        """True for a GPU."""
        return self.gpu is not None

    def decode(
        self, jpegs: Sequence[bytes | memoryview], windows: Windows, image_px: int
    ) -> Pixels:
        """As `raytrain.data.decode.Decoder` says."""
        out = np.empty((len(jpegs), image_px, image_px, 3), dtype=np.uint8)
        files = [np.frombuffer(jpeg, dtype=np.uint8) for jpeg in jpegs]
        geometry = _geometry(windows, image_px)
        for first in range(0, len(files), _BATCH):
            part = slice(first, first + _BATCH)
            inputs = {"jpeg": files[part], **{k: v[part] for k, v in geometry.items()}}
            pipeline = _pipelines.get(self.gpu)
            try:
                out[part] = _run(pipeline, inputs)
            except RuntimeError as error:
                _pipelines.forget(self.gpu)
                damaged = self._first_damaged(inputs)
                if damaged is None:
                    raise
                raise DamagedImageError(first + damaged, "DALI can't decode it") from error
        return out

    def _first_damaged(self, inputs: dict[str, Any]) -> int | None:
        """The image that DALI failed on, which it doesn't always tell itself."""
        for i in range(len(inputs["jpeg"])):
            pipeline = _build(self.gpu, 1)
            try:
                _run(pipeline, {k: v[i : i + 1] for k, v in inputs.items()})
            except RuntimeError:
                return i
        return None


def _geometry(windows: Windows, image_px: int) -> dict[str, NDArray[Any]]:
    """Windows as DALI wants them: (row, column) pairs, shape (n, 2).

    Resizing takes the whole window as its region of interest, with left and right exchanged to
    mirror it.
    """
    height, width, flip = windows.height, windows.width, windows.flip
    zero = np.zeros_like(height)
    return {
        "start": np.stack([windows.top, windows.left], axis=1).astype(np.int32),
        "shape": np.stack([height, width], axis=1).astype(np.int32),
        "from": np.stack([zero, np.where(flip, width, 0)], axis=1).astype(np.float32),
        "to": np.stack([height, np.where(flip, 0, width)], axis=1).astype(np.float32),
        "size": np.full((len(height), 2), image_px, dtype=np.float32),
    }


def _build(gpu: int | None, batch: int) -> Any:
    dali, fn, types = (import_module(f"nvidia.dali{part}") for part in ("", ".fn", ".types"))
    on_cpu = gpu is None
    pipeline = dali.Pipeline(
        batch, num_threads=1, device_id=gpu, exec_async=False, exec_pipelined=False
    )
    with pipeline:
        jpeg = fn.external_source(name="jpeg", ndim=1, dtype=types.UINT8)
        pairs = {
            name: fn.external_source(name=name, ndim=1, dtype=kind)
            for name, kind in (
                ("start", types.INT32),
                ("shape", types.INT32),
                ("from", types.FLOAT),
                ("to", types.FLOAT),
                ("size", types.FLOAT),
            )
        }
        crops = fn.decoders.image_slice(
            jpeg,
            device="cpu" if on_cpu else "mixed",
            start=pairs["start"],
            shape=pairs["shape"],
            axes=(0, 1),
            output_type=types.RGB,
            adjust_orientation=False,  # a ShardSet's images are upright
        )
        resized = fn.resize(
            crops,
            size=pairs["size"],
            roi_start=pairs["from"],
            roi_end=pairs["to"],
            interp_type=types.INTERP_LINEAR,
            antialias=True,
        )
        pipeline.set_outputs(resized)
    pipeline.build()
    return pipeline


def _run(pipeline: Any, inputs: dict[str, Any]) -> Pixels:
    for name, values in inputs.items():
        pipeline.feed_input(name, values)
    (crops,) = pipeline.run()
    pixels: Pixels = crops.as_cpu().as_array()
    return pixels


class _Pipelines(threading.local):
    """The pipelines of one thread: DALI's aren't safe to share."""

    def __init__(self) -> None:
        self._by_gpu: dict[int | None, Any] = {}

    def get(self, gpu: int | None) -> Any:
        if gpu not in self._by_gpu:
            self._by_gpu[gpu] = _build(gpu, _BATCH)
        return self._by_gpu[gpu]

    def forget(self, gpu: int | None) -> None:
        """Drop a pipeline that failed: DALI won't run it again."""
        del self._by_gpu[gpu]


_pipelines = _Pipelines()
