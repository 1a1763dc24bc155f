"""The Ray that a command runs on: the cluster that it is in, or one of its own on this machine."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

import ray

from raytrain.errors import RaytrainError
from raytrain.run.record import cpu_model
from raytrain.run.rows import Hardware

LOCAL_WORKERS_PER_CORE = 4  # more CPU workers than that on one machine only get in each other's way


def ensure_ray(verbose: bool = False, workers: int = 1, spare: int = 0) -> None:
    """Connect to Ray, once in a process.

    With ``RAY_ADDRESS`` set, as in a Ray job, that cluster is used. Else a Ray of our own is
    started on this machine, without a dashboard; it ends with this process. Its number of CPUs is
    a number of slots, and only training workers take any: whatever reads, decodes or validates
    takes none, so nothing can wait for a slot that a worker holds.

    Args:
        verbose: show Ray's own log and the prints of worker processes.
        workers: training workers that a Ray of our own must have room for.
        spare: CPU slots that it must have beside them.

    Raises:
        RaytrainError: the cluster can't be reached.
    """
    if ray.is_initialized():
        return
    cores = os.cpu_count() or 1
    address = os.environ.get("RAY_ADDRESS")
    if not address and workers > LOCAL_WORKERS_PER_CORE * cores:
        raise RaytrainError(
            f"--workers {workers}: this machine has {cores} cores, which is room for "
            f"{LOCAL_WORKERS_PER_CORE * cores} workers; ask for fewer, or set RAY_ADDRESS to train "
            "on a cluster"
        )
    level = logging.INFO if verbose else logging.ERROR
    for name in ("ray", "ray.data", "ray.train"):
        logging.getLogger(name).setLevel(level)
    log: dict[str, Any] = {"log_to_driver": verbose, "logging_level": level}
    if not address:
        bound_ends()
        _start_here(max(cores, workers + spare), log)
        return
    try:
        ray.init(address=address, **log)
    except Exception as error:  # Ray raises bare ones
        raise RaytrainError(
            f"can't start on the cluster at RAY_ADDRESS={address}: {str(error).splitlines()[0]}; "
            "check the address, or unset RAY_ADDRESS to train on this machine"
        ) from error


def bound_ends() -> None:
    """Let the process groups of a Ray that is started after this end within 5 s, not 30.

    Ray Train waits so long for a worker that hangs, and passes the setting on to no process: it
    counts where Ray starts (``cluster/node/network.sh`` on a cluster).
    """
    os.environ.setdefault("TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S", "5")


def _start_here(slots: int, log: dict[str, Any]) -> None:
    """Start a Ray of our own; once more where its processes weren't there within Ray's 30 s."""
    for tries_left in (1, 0):
        try:
            ray.init(address="local", num_cpus=slots, include_dashboard=False, **log)
        except Exception as error:
            ray.shutdown()
            if not tries_left:
                raise RaytrainError(
                    f"can't start a local Ray: {str(error).splitlines()[0]}; try again when this "
                    "machine is less busy"
                ) from error
        else:
            return


@dataclass(frozen=True)
class Placement:
    """What a run takes of the cluster.

    Attributes:
        workers: (fewest, most) training workers.
        nodes: machines of the cluster.
        use_gpu: whether each worker has a GPU.
        validator_gpu: whether a GPU is left for validating beside the training.
        beside: whether validation can run beside the training at all.
    """

    workers: tuple[int, int]
    nodes: int
    use_gpu: bool
    validator_gpu: bool
    beside: bool

    @property
    def workers_a_node(self) -> int:
        return -(-self.workers[1] // self.nodes)

    @property
    def elastic(self) -> bool:
        return self.workers[0] < self.workers[1]


def place(workers: tuple[int, int] | None, device: str, wants_beside: bool) -> Placement:
    """Divide the cluster between the workers and the validation, before anything starts.

    Args:
        workers: (fewest, most); None is one a GPU, or one a machine where there are no GPUs.
        device: ``auto``, ``cpu`` or ``cuda``.
        wants_beside: whether the recipe wants validation beside the training.

    Raises:
        RaytrainError: the cluster can never give that many workers.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]
    gpus = round(sum(node["Resources"].get("GPU", 0) for node in nodes))
    cpus = round(sum(node["Resources"].get("CPU", 0) for node in nodes))
    use_gpu = device != "cpu" and gpus > 0
    if device == "cuda" and not gpus:
        raise RaytrainError("--device cuda: the cluster has no GPU; leave --device out")
    fewest, most = workers or ((gpus, gpus) if use_gpu else (len(nodes), len(nodes)))
    room, unit = (gpus, "GPU") if use_gpu else (cpus, "CPU")
    if fewest > room:
        raise RaytrainError(
            f"--workers {fewest}: the cluster has {room} {unit}{'s' if room != 1 else ''}, "
            f"one for each worker; ask for at most {room}"
        )
    spare_gpu = use_gpu and gpus > most
    beside = wants_beside and (spare_gpu or not use_gpu)
    return Placement((fewest, most), len(nodes), use_gpu, spare_gpu, beside)


def cluster_hardware(placement: Placement) -> Hardware:
    """What the cluster is, for the record of the run. The CPU's name is this machine's."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    total = ray.cluster_resources()
    gpu_types = [k.partition(":")[2] for k in total if k.startswith("accelerator_type:")]
    gpus = round(total.get("GPU", 0)) if placement.use_gpu else 0
    cpus = os.cpu_count() or 1 if len(nodes) == 1 else round(total.get("CPU", 0))
    gpu = (gpu_types[0] if gpu_types else "GPU") if gpus else None
    return Hardware(nodes=len(nodes), cpu=cpu_model(), cpus=cpus, gpu=gpu, gpus=gpus)
