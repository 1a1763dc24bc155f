"""Which decoder a worker uses."""

from __future__ import annotations

from raytrain.data.decode import Decoder
from raytrain.data.decode_cpu import CpuDecoder
from raytrain.data.decode_dali import DaliDecoder, dali_installed
from raytrain.data.synthetic import SyntheticDecoder
from raytrain.errors import RaytrainError
from raytrain.recipe.types import DecoderName

# One core decodes 5,000 images/s at 128 px and 2,300 at 224 (`raytrain bench input` on an EPYC);
# the record runs of 2018 took 3,100 to 4,300 a V100 at 128 px. Four leave room for faster GPUs.
_ENOUGH_CORES = 4


def choose_decoder(asked: DecoderName, device: str = "cpu", cores: int = 1) -> Decoder:
    """The decoder of a worker.

    Args:
        asked: the recipe's ``input.decoder``. ``auto`` is ``dali_gpu`` for a worker with DALI, a
            GPU and fewer than four CPU cores; else ``cpu``, the fastest on a CPU by far.
        device: the worker's torch device, such as ``cuda:1``.
        cores: CPU cores that the worker may decode with.

    Raises:
        RaytrainError: what is asked for isn't installed, or needs a GPU that the worker hasn't.
    """
    has_gpu = device.startswith("cuda")
    if asked == "auto":
        few_cores = has_gpu and cores < _ENOUGH_CORES and dali_installed()
        asked = "dali_gpu" if few_cores else "cpu"
    if asked == "dali_gpu":
        if not has_gpu:
            raise RaytrainError(
                f"input.decoder: dali_gpu needs a GPU, but this worker's device is {device}; "
                "choose auto, cpu or dali_cpu"
            )
        return DaliDecoder(int(device.partition(":")[2] or 0))
    if asked == "dali_cpu":
        return DaliDecoder()
    return SyntheticDecoder() if asked == "synthetic" else CpuDecoder()
