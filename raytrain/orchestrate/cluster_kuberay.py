"""What is wrong with a file that describes a RayCluster of KubeRay (API ray.io/v1)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from raytrain.errors import RaytrainError
from raytrain.orchestrate.cluster_file import Document, Finding, Key, check_known
from raytrain.orchestrate.cluster_known import RAY_IMAGE, RAYCLUSTER_KEYS

_GPU = "nvidia.com/gpu"
_GIB = {"": 2**-30, "M": 1e6 / 2**30, "G": 1e9 / 2**30, "Mi": 2**-10, "Gi": 1.0, "Ti": 1024.0}


def check_raycluster(path: Path, documents: list[Document], disk_gb: float) -> Iterator[Finding]:
    """Check the RayCluster among the documents of a file.

    Args:
        path: the file.
        documents: its content.
        disk_gb: what a pod's own storage must have room for, in GB.

    Raises:
        RaytrainError: there is no RayCluster.
    """
    clusters = [d for d in documents if d.at(str, "kind") == "RayCluster"]
    if not clusters:
        raise RaytrainError(f"{path}: no `kind: RayCluster` in it; give the file that has one")
    guarded = any(d.at(str, "kind") == "NetworkPolicy" for d in documents)
    for document in clusters:
        yield from _check_access(document, guarded)
        yield from _check_keys(document)
        yield from _check_images(document)
        for key in _groups(document):
            if key != _HEAD:
                yield from _check_counts(document, key)
            yield from _check_pod(document, key, disk_gb)


_HEAD: Key = ("spec", "headGroupSpec")
_WORKERS: Key = ("spec", "workerGroupSpecs")


def _groups(document: Document) -> list[Key]:
    workers = document.at(list, *_WORKERS) or []
    return [_HEAD, *((*_WORKERS, number) for number in range(len(workers)))]


def _container(key: Key) -> Key:
    """Ray's own container comes first in a pod."""
    return (*key, "template", "spec", "containers", 0)


def _check_access(document: Document, guarded: bool) -> Iterator[Finding]:
    mode: Key = ("spec", "authOptions", "mode")
    if document.at(str, *mode) != "token":
        yield document.found(
            mode, "no authentication: who reaches the head runs code there; write mode: token"
        )
    service: Key = (*_HEAD, "serviceType")
    if document.at(str, *service) in ("LoadBalancer", "NodePort"):
        yield document.found(
            service, "opens the dashboard and the job server outside; ClusterIP and port-forward"
        )
    if document.at(bool, *_HEAD, "enableIngress"):
        yield document.found((*_HEAD, "enableIngress"), "opens the dashboard outside; remove it")
    if not guarded and not document.at(dict, "spec", "networkIsolation"):
        yield document.found(
            ("spec",),
            "every pod of Kubernetes may reach the dashboard; add a NetworkPolicy to the file as "
            "cluster/raycluster.yaml has it",
        )


def _check_keys(document: Document) -> Iterator[Finding]:
    yield from check_known(document, ("spec",), RAYCLUSTER_KEYS["spec"])
    for key in _groups(document):
        yield from check_known(document, key, RAYCLUSTER_KEYS[str(key[1])])


def _check_images(document: Document) -> Iterator[Finding]:
    here = metadata.version("ray")
    version = document.at(str, "spec", "rayVersion")
    if version != here:
        yield document.found(
            ("spec", "rayVersion"), f"{version or 'missing'}, but this machine has {here}; write it"
        )
    first = document.at(str, *_container(_HEAD), "image")
    for group in _groups(document):
        key = (*_container(group), "image")
        image = document.at(str, *key)
        tag = (image or "").rpartition(":")[2]
        release = RAY_IMAGE.match(image or "")
        if image is None or ":" not in image or tag in ("latest", "nightly"):
            yield document.found(key, f"{image or 'missing'} changes by itself; pin a version")
        elif image != first:
            yield document.found(key, f"{image}, but the head has {first}; all need the same")
        elif release and release[2] != here:
            yield document.found(
                key, f"Ray {release[2]}, but this machine has {here}; use the same"
            )


def _check_counts(document: Document, key: Key) -> Iterator[Finding]:
    fewest = document.at(int, *key, "minReplicas") or 0
    most = document.at(int, *key, "maxReplicas")
    now = document.at(int, *key, "replicas")
    if most is None:
        yield document.found(
            (*key, "maxReplicas"), "missing, and KubeRay takes 2147483647; say how many at most"
        )
    elif fewest > most:
        yield document.found(
            (*key, "minReplicas"), f"{fewest} is above maxReplicas {most}; lower it or raise that"
        )
    elif now is not None and not fewest <= now <= most:
        yield document.found(
            (*key, "replicas"), f"{now} is outside minReplicas {fewest} to maxReplicas {most}"
        )


def _check_pod(document: Document, key: Key, disk_gb: float) -> Iterator[Finding]:
    container = _container(key)
    limits: Key = (*container, "resources", "limits")
    said = document.at(str, *key, "rayStartParams", "num-gpus")
    gpus = str((document.at(dict, *limits) or {}).get(_GPU, 0))
    if said is not None and said != gpus:
        yield document.found(
            (*key, "rayStartParams", "num-gpus"), f"{said}, but the pod gets {gpus} GPUs; remove it"
        )
    volumes = _mounted(document, key)
    if not any("emptyDir" in volume for path, volume in volumes if path == "/dev/shm"):  # noqa: S108
        yield document.found(
            (*container, "volumeMounts"),
            "a pod's /dev/shm is 64 MB; mount an emptyDir of medium Memory for Ray's object store",
        )
    if not any(
        kind in volume for _, volume in volumes for kind in ("persistentVolumeClaim", "nfs", "csi")
    ):
        yield document.found(
            (*container, "volumeMounts"),
            "no storage that all pods share; mount a persistentVolumeClaim (ReadWriteMany)",
        )
    size = (document.at(dict, *limits) or {}).get("ephemeral-storage")
    if size is None or _gib(str(size)) < disk_gb:
        yield document.found(
            (*limits, "ephemeral-storage"),
            f"{size or 'missing'}, but data and system need {disk_gb:.0f} GB; enlarge it, or say "
            "by --data-gb what the data takes",
        )


def _mounted(document: Document, key: Key) -> list[tuple[str, dict[str, Any]]]:
    """(path, volume) of each volume that Ray's container mounts."""
    listed = document.at(list, *key, "template", "spec", "volumes") or []
    volumes = {str(v.get("name")): v for v in listed if isinstance(v, dict)}
    mounts = document.at(list, *_container(key), "volumeMounts") or []
    return [
        (mount.get("mountPath", ""), volumes.get(str(mount.get("name")), {}))
        for mount in mounts
        if isinstance(mount, dict)
    ]


def _gib(quantity: str) -> float:
    """A Kubernetes quantity of bytes in GiB; 0 where it is none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(\w*)", quantity)
    return float(match[1]) * _GIB.get(match[2], 0.0) if match else 0.0
