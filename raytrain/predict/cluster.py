"""What a cluster file says of the machines that train: their type, and how many there may be."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from raytrain.errors import RaytrainError
from raytrain.orchestrate.cluster_file import Document, Key, read_documents
from raytrain.predict.constants import MACHINES, Machine


@dataclass(frozen=True, slots=True)
class Cluster:
    """The machines of a cluster that have GPUs.

    Attributes:
        machine_name: their type.
        machine: what is known of it.
        most_nodes: how many the file allows.
    """

    machine_name: str
    machine: Machine
    most_nodes: int


@dataclass(frozen=True, slots=True)
class _NodeType:
    """Nodes with GPUs: where the file has them, the type of their machines if it tells, how many
    there may be."""

    key: Key
    machine_name: str | None
    most_nodes: int


def read_cluster(path: Path, machine_name: str | None = None) -> Cluster:
    """Read a file for Ray's cluster launcher or KubeRay.

    Args:
        path: the file.
        machine_name: type of the machines that have GPUs, in place of what the file says.

    Raises:
        RaytrainError: the file can't be read, has no nodes with GPUs or several kinds of them, or
            their machine isn't known.
    """
    for document in read_documents(path):
        types = list(_node_types(document))
        if not types:
            continue
        names = [machine_name] if machine_name else [each.machine_name for each in types]
        first = names[0]
        where = f"{path}:{document.found(types[0].key, '').line}"
        if first is None:
            raise RaytrainError(f"{where}: says no type of machine; give --machine: {_known()}")
        if len(set(names)) > 1:
            listed = ", ".join(sorted({str(name) for name in names}))
            raise RaytrainError(f"{where}: several types of machines ({listed}); choose: --machine")
        count = sum(each.most_nodes for each in types)
        most = document.at(int, "max_workers")
        if most is not None:
            count = min(count, most + _heads(document))
        if count < 1:
            raise RaytrainError(f"{where}: no node may be started; raise max_workers")
        return Cluster(first, _machine(first, "--machine" if machine_name else where), count)
    raise RaytrainError(f"{path}: no nodes with GPUs; give a cluster file that has some")


def _machine(name: str, where: str) -> Machine:
    if name not in MACHINES:
        close = difflib.get_close_matches(name, MACHINES, n=1)
        mend = f"did you mean {close[0]}?" if close else f"known are {_known()}"
        raise RaytrainError(f"{where}: {name} isn't a machine to plan with; {mend}")
    return MACHINES[name]


def _known() -> str:
    return ", ".join(MACHINES)


def _node_types(document: Document) -> Iterator[_NodeType]:
    provider = document.at(str, "provider", "type")
    if provider == "local":
        addresses = document.at(list, "provider", "worker_ips") or []
        yield _NodeType(("provider", "worker_ips"), None, len(addresses))
    elif provider:
        yield from _launcher_types(document)
    elif document.at(str, "kind") == "RayCluster":
        yield from _kuberay_types(document)


def _launcher_types(document: Document) -> Iterator[_NodeType]:
    head = document.at(str, "head_node_type")
    for name in document.at(dict, "available_node_types") or {}:
        key = ("available_node_types", name)
        machine_name = _launcher_machine(document, key)
        gpus = document.at(int, *key, "resources", "GPU")
        if machine_name in MACHINES or gpus:
            workers = document.at(int, *key, "max_workers") or 0
            yield _NodeType(key, machine_name, workers + 1 if name == head else workers)


def _launcher_machine(document: Document, key: Key) -> str | None:
    config = (*key, "node_config")
    name = document.at(str, *config, "InstanceType") or document.at(str, *config, "machineType")
    if name is None:
        return None
    added = (*config, "guestAccelerators", 0)
    kind = document.at(str, *added, "acceleratorType")
    if kind is None:
        return name.rpartition("/")[2]
    count = document.at(int, *added, "acceleratorCount")
    return f"{name.rpartition('/')[2]}+{count}x{kind.rpartition('-')[2].upper()}"


def _heads(document: Document) -> int:
    """Nodes with GPUs beside the workers: the head, if its type has some."""
    head = document.at(str, "head_node_type")
    return sum(each.key[-1] == head for each in _node_types(document))


def _kuberay_types(document: Document) -> Iterator[_NodeType]:
    groups = ("spec", "workerGroupSpecs")
    for number in range(len(document.at(list, *groups) or [])):
        key = (*groups, number)
        pod = (*key, "template", "spec", "containers", 0, "resources", "limits")
        gpus = document.at(str, *pod, "nvidia.com/gpu") or document.at(int, *pod, "nvidia.com/gpu")
        if gpus:
            replicas = document.at(int, *key, "maxReplicas") or 0
            yield _NodeType(key, None, replicas)
