"""`raytrain cluster check`: what is wrong with a cluster file, before any machine is paid for.

First Ray's own schema, which ships in its wheel; then what that lets through. No cloud is asked,
so a machine type, image or address that has the right form but doesn't exist isn't seen.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import jsonschema  # type: ignore[import-untyped]

from raytrain.errors import RaytrainError
from raytrain.orchestrate.cluster_commands import (
    SETUP,
    check_commands,
    check_secrets,
    check_versions,
    commands,
)
from raytrain.orchestrate.cluster_file import Document, Finding, check_known, read_documents
from raytrain.orchestrate.cluster_known import (
    NODE_CONFIG_KEYS,
    PROVIDER_KEYS,
    aws_machine,
    gcp_machine,
    is_aws_machine,
)
from raytrain.orchestrate.cluster_kuberay import check_raycluster

IMAGENET_GB: Final = 150
"""ImageNet-1k of 2012: training (138 GB) and validation (6 GB) images as published."""
SYSTEM_GB: Final = 40
"""System, driver, Python packages (7 GB where it was measured), and room for what Ray spills."""

Rule = Callable[[Document], Iterator[Finding]]


def check_cluster_file(path: Path, data_gb: float | None = None) -> list[Finding]:
    """Check a file for Ray's cluster launcher, or for KubeRay.

    Args:
        path: the file.
        data_gb: what each node's disk must have room for beside the system; by default ImageNet.

    Returns:
        What is to be mended, in the order of lines; nothing where all is well.

    Raises:
        RaytrainError: the file can't be read or is neither.
    """
    documents = read_documents(path)
    disk_gb = (IMAGENET_GB if data_gb is None else data_gb) + SYSTEM_GB
    if any("apiVersion" in document.data for document in documents):
        found = check_raycluster(path, documents, disk_gb)
    elif len(documents) == 1 and "provider" in documents[0].data:
        found = _check_launcher_file(path, documents[0], disk_gb)
    else:
        raise RaytrainError(
            f"{path}: no cluster file: `provider` (for `ray up`) or `kind: RayCluster` is missing"
        )
    repeated = [
        document.found(key, "stands twice, and only the last one counts; remove one")
        for document in documents
        for key in document.repeated
    ]
    return sorted({*found, *repeated})


def _check_launcher_file(path: Path, document: Document, disk_gb: float) -> Iterator[Finding]:
    of_wrong_type = False
    for error in _schema_errors(document):
        yield from _told(document, error)
        of_wrong_type |= error.validator == "type"
    if of_wrong_type:
        return  # the rules below count on the types
    for rule in _RULES:
        yield from rule(document)
    yield from _check_disks(document, disk_gb)
    yield from check_versions(document, path)


# --- Ray's schema


def _schema_errors(document: Document) -> Iterator[Any]:
    # read as a file of the wheel: importing ray.autoscaler would import all of Ray
    file = metadata.distribution("ray").locate_file("ray/autoscaler/ray-schema.json")
    schema = json.loads(Path(str(file)).read_text(encoding="utf-8"))
    content = dict(document.data)
    if _provider(document) == "local":
        content.pop("min_workers", None)  # Ray takes it out before it looks at its schema
    yield from jsonschema.Draft7Validator(schema).iter_errors(content)


def _told(document: Document, error: Any) -> Iterator[Finding]:
    key = tuple(error.absolute_path)
    if error.validator == "additionalProperties":
        yield from check_known(document, key, set(error.schema.get("properties", {})))
    elif error.validator == "required":
        for name in sorted(set(error.validator_value) - set(error.instance)):
            yield document.found((*key, name), "missing, and Ray needs it; add it")
    elif error.validator == "type":
        yield document.found(key, f"must be of type {error.validator_value}, as Ray reads it")
    else:
        yield document.found(key, f"Ray's schema refuses it: {error.message[:100]}")


# --- rules of our own, each for a whole file


def _provider(document: Document) -> str:
    return document.at(str, "provider", "type") or ""


def _node_types(document: Document) -> dict[str, Any]:
    return document.at(dict, "available_node_types") or {}


def _has_workers(document: Document) -> bool:
    return document.at(int, "max_workers") != 0


def _check_unknown_keys(document: Document) -> Iterator[Finding]:
    provider = _provider(document)
    if provider in PROVIDER_KEYS:
        yield from check_known(document, ("provider",), PROVIDER_KEYS[provider])
    if provider in NODE_CONFIG_KEYS:
        for name in _node_types(document):
            key = ("available_node_types", name, "node_config")
            yield from check_known(document, key, NODE_CONFIG_KEYS[provider])


def _check_counts(document: Document) -> Iterator[Finding]:
    most = document.at(int, "max_workers")
    if most is None:
        yield document.found(
            ("max_workers",), "missing, and Ray takes 2; say how many workers there may be at most"
        )
    types = _node_types(document)
    for name in types:
        yield from _check_counts_of_type(document, name, most)
    fewest = sum(node_type.get("min_workers", 0) for node_type in types.values())
    if most is not None and fewest > most:
        yield document.found(
            ("max_workers",), f"{most} is below the sum {fewest} of all min_workers; raise it"
        )


def _check_counts_of_type(document: Document, name: str, total: int | None) -> Iterator[Finding]:
    key = ("available_node_types", name)
    fewest = document.at(int, *key, "min_workers") or 0
    most = document.at(int, *key, "max_workers")
    if most is None:
        yield document.found(
            (*key, "max_workers"), "missing, and Ray takes the cluster's; say how many at most"
        )
    elif fewest > most:
        yield document.found(
            (*key, "min_workers"), f"{fewest} is above max_workers {most}; lower it or raise that"
        )
    elif name == document.at(str, "head_node_type") and most > 0:
        yield document.found(
            (*key, "max_workers"), f"Ray may start {most} workers of the head's type; set it to 0"
        )
    elif total is not None and most > total:
        yield document.found(
            (*key, "max_workers"), f"{most} is above the cluster's max_workers {total}; lower it"
        )


def _check_head(document: Document) -> Iterator[Finding]:
    if _provider(document) == "local":
        return
    types, head = _node_types(document), document.at(str, "head_node_type")
    if not types:
        yield document.found(("available_node_types",), "missing; describe the machines")
    elif head not in types:
        what = "missing" if head is None else f"no node type is called {head!r}"
        yield document.found(("head_node_type",), f"{what}; it must be one of {', '.join(types)}")


def _check_local(document: Document) -> Iterator[Finding]:
    if _provider(document) != "local" or "coordinator_address" in document.data["provider"]:
        return
    for name in ("available_node_types", "head_node_type"):
        if name in document.data:
            yield document.found((name,), "Ray refuses it for provider local; remove it")
    key = ("provider", "worker_ips")
    head, workers = document.at(str, "provider", "head_ip"), document.at(list, *key)
    if head is None:
        yield document.found(("provider", "head_ip"), "missing; give the head's address")
    if workers is None:
        yield document.found(key, "missing; give the workers' addresses, [] for none")
        return
    for number, address in enumerate(workers):
        if address == head or address in workers[:number]:
            yield document.found((*key, number), f"{address} is there twice; a machine is one node")
    for name in ("min_workers", "max_workers"):
        count = document.at(int, name)
        if count is not None and count > len(workers):
            yield document.found(
                (name,), f"{count} is above the {len(workers)} addresses in worker_ips; lower it"
            )


def _check_machines(document: Document) -> Iterator[Finding]:
    check = {"aws": _check_aws_machine, "gcp": _check_gcp_machine}.get(_provider(document))
    if check is not None:
        for name in _node_types(document):
            yield from check(document, name)


def _check_aws_machine(document: Document, name: str) -> Iterator[Finding]:
    config = ("available_node_types", name, "node_config")
    machine = document.at(str, *config, "InstanceType")
    if machine is None:
        if not document.at(dict, *config, "LaunchTemplate"):
            yield document.found((*config, "InstanceType"), "missing; name one")
    elif not is_aws_machine(machine):
        yield document.found((*config, "InstanceType"), f"{machine!r} is no EC2 machine type")
    elif document.at(dict, *config[:-1], "resources"):  # {}: Ray asks EC2 for them
        yield from _check_resources(document, name, machine, *aws_machine(machine))


def _check_gcp_machine(document: Document, name: str) -> Iterator[Finding]:
    config = ("available_node_types", name, "node_config")
    machine = document.at(str, *config, "machineType")
    if machine is None:
        yield document.found((*config, "machineType"), "missing; name one")
        return
    cpus, gpus = gcp_machine(machine.rpartition("/")[2])
    if gpus == 0:
        added = (*config, "guestAccelerators")
        numbers = range(len(document.at(list, *added) or []))
        gpus = sum(document.at(int, *added, n, "acceleratorCount") or 0 for n in numbers)
    yield from _check_resources(document, name, machine, cpus, gpus)
    if gpus and document.at(str, *config, "scheduling", "onHostMaintenance") != "TERMINATE":
        yield document.found(
            (*config, "scheduling"),
            "Compute Engine refuses GPUs without it; write {onHostMaintenance: TERMINATE}",
        )


def _check_resources(
    document: Document, name: str, machine: str, cpus: int | None, gpus: int | None
) -> Iterator[Finding]:
    key = ("available_node_types", name, "resources")
    for unit, has in (("CPU", cpus), ("GPU", gpus)):
        said = document.at(int, *key, unit) or 0
        keeps_work_away = unit == "CPU" and said == 0 and unit in (document.at(dict, *key) or {})
        if has is not None and said != has and not keeps_work_away:
            yield document.found((*key, unit), f"{said}, but a {machine} has {has}; write {has}")


def _check_zone(document: Document) -> Iterator[Finding]:
    zones = document.at(str, "provider", "availability_zone") or ""
    if "," in zones and _has_workers(document):
        yield document.found(
            ("provider", "availability_zone"),
            "several zones: gradients cross between them slowly and at a price; name one",
        )


def _check_storage(document: Document) -> Iterator[Finding]:
    if not _has_workers(document):
        return
    key = ("metadata", "storage")
    storage = document.at(str, *key)
    if storage is None:
        yield document.found(
            key, "missing: say where all nodes read and write (a mounted folder or an address)"
        )
    elif "://" not in storage and not any(
        "mount" in command and storage in command for _, command in commands(document, *SETUP)
    ):
        yield document.found(
            key,
            f"{storage} is each node's own disk; give an address such as s3://bucket/folder, or "
            f"mount it by a command (for one mounted already: mountpoint -q {storage})",
        )


def _check_aws_access(document: Document) -> Iterator[Finding]:
    if _provider(document) != "aws":
        return
    head = document.at(str, "head_node_type")
    for name in _node_types(document):
        key = ("available_node_types", name, "node_config")
        config = document.at(dict, *key) or {}
        if "LaunchTemplate" in config:
            continue
        if document.at(str, *key, "MetadataOptions", "HttpTokens") != "required":
            yield document.found(
                (*key, "MetadataOptions"),
                "any process that can be made to fetch a URL gets the machine's credentials; "
                "write {HttpTokens: required}",
            )
        if name == head and "IamInstanceProfile" not in config:
            yield document.found(
                (*key, "IamInstanceProfile"),
                "missing, and Ray makes one that may do everything in EC2 and S3; "
                "name one of your own (cluster/README.md)",
            )


def _check_security_group(document: Document) -> Iterator[Finding]:
    rules = ("provider", "security_group", "IpPermissions")
    for number, rule in enumerate(document.at(list, *rules) or []):
        to_world = any(address in str(rule) for address in ("'0.0.0.0/0'", "'::/0'"))
        ports = [document.at(int, *rules, number, end) for end in ("FromPort", "ToPort")]
        if to_world and ports != [22, 22]:
            yield document.found(
                (*rules, number),
                "open to the world; let in SSH only and forward ports through it (ray dashboard)",
            )


def _check_disks(document: Document, need_gb: float) -> Iterator[Finding]:
    disks = {"aws": ("BlockDeviceMappings", "Ebs", "VolumeSize"),
             "gcp": ("disks", "initializeParams", "diskSizeGb")}  # fmt: skip
    if _provider(document) not in disks:
        return
    listed, part, size = disks[_provider(document)]
    for name in _node_types(document):
        key = ("available_node_types", name, "node_config", listed)
        if "LaunchTemplate" in (document.at(dict, *key[:-1]) or {}):
            continue
        numbers = range(len(document.at(list, *key) or []))
        sizes = [document.at(int, *key, n, part, size) or 0 for n in numbers]
        if sum(sizes) < need_gb:
            where = (*key, sizes.index(max(sizes)), part, size) if sizes else key
            yield document.found(
                where,
                f"{sum(sizes)} GB of disk, but data and system need {need_gb:.0f}; enlarge it, or "
                "say by --data-gb what the data takes",
            )


_RULES: Final[tuple[Rule, ...]] = (
    _check_unknown_keys,
    _check_counts,
    _check_head,
    _check_local,
    _check_machines,
    _check_zone,
    _check_storage,
    _check_aws_access,
    _check_security_group,
    check_commands,
    check_secrets,
)
