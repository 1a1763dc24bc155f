"""Whether torch can compute on a GPU: a wheel holds kernels for some generations only."""

from __future__ import annotations

import re
from collections.abc import Sequence


def kernel_fault(
    name: str, capability: tuple[int, int], archs: Sequence[str], torch_version: str
) -> str | None:
    """Why torch can't compute on a GPU, with the mend; None where it can.

    Args:
        name: of the GPU.
        capability: its compute capability, (7, 0) for a V100.
        archs: ``torch.cuda.get_arch_list()``; empty where torch doesn't tell.
        torch_version: of the torch that has them.
    """
    if not archs or any(_runs_on(arch, capability) for arch in archs):
        return None
    mend = (
        "install with cluster/constraints-v100.txt (torch 2.10.0, the last on the ordinary index "
        "that has them)"
        if capability == (7, 0)
        else "install a torch that has them"
    )
    return (
        f"torch {torch_version} has no kernels for its {name} (sm_{capability[0]}{capability[1]}), "
        f"only for {', '.join(archs)}; {mend}"
    )


def _runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """Whether code for `arch` runs: sm_XY from X.Y to the end of X, compute_XY on all later."""
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", arch)
    if match is None:
        return False
    target = int(match[2]), int(match[3])
    if match[4]:  # sm_90a: for that one GPU
        return target == capability
    if match[1] == "compute":
        return target <= capability
    return target[0] == capability[0] and target[1] <= capability[1]
