"""Pre-flight: whether all nodes are fit for a run, and alike, before anything starts on them.

Each node looks at itself (`examine`): its versions and GPUs, whether it reaches the run directory
and the data, its network names, its disks. The driver compares. Nodes that join later are not
looked at. The workers time an all-reduce among them as they form (`launch.run_worker`): they have
the process group and torch, which a fresh process on each node would load for seconds.
"""

from __future__ import annotations

import contextlib
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.console import Console
from rich.table import Table

from raytrain.errors import RaytrainError
from raytrain.orchestrate.node_report import Gpu, NodeReport, Probe, examine
from raytrain.run.kernels import kernel_fault

if TYPE_CHECKING:
    from raytrain.train import Job  # a node that looks at itself needn't load torch

LIMIT_SECONDS: Final = 10.0
"""How long the nodes have to answer; one that doesn't is warned of, not refused."""
MOST_SKEW_SECONDS: Final = 10.0
"""Clocks further apart make the logs of a run unreadable; at minutes, S3 refuses requests."""
LEAST_FREE_BYTES: Final = 2**30
"""Below it a node is warned of."""
OLDEST_DRIVER: Final = {12: 525, 13: 580}
"""CUDA's major version -> first driver branch (CUDA Compatibility, minor version compatibility)."""


def preflight(job: Job, use_gpu: bool, verbose: bool) -> None:
    """Look at every node of the Ray cluster, for 10 s at most.

    Where all nodes are on one machine, as with a local Ray, this process looks for itself.

    Args:
        job: the run; its directory is made where it is missing.
        use_gpu: whether training uses GPUs.
        verbose: print a table of the nodes to stderr.

    Raises:
        RaytrainError: a node isn't fit, or differs from this one; the line names it.
    """
    import torch  # noqa: PLC0415 (by the driver, which has it; not by each node that is looked at)

    nodes = [node for node in ray.nodes() if node["Alive"]]
    here = ray.get_runtime_context().get_node_id()
    nodes.sort(key=lambda node: node["NodeID"] != here)  # this one first: the measure of the others
    faults: list[str] = []
    warnings: list[str] = []
    one_machine = len({node["NodeManagerAddress"] for node in nodes}) == 1
    with _written(job, use_gpu, one_machine) as probe:
        if one_machine:
            reports = [examine(probe, nodes[0]["NodeManagerAddress"])]
        else:
            reports, faults, warnings = ask(nodes, probe, LIMIT_SECONDS)
    faults += [f"node {r.node}: {fault}" for r in reports for fault in r.faults]
    faults += differences(reports)
    if use_gpu:
        faults += gpu_faults(reports, torch.cuda.get_arch_list())
    if verbose:
        Console(stderr=True).print(table(reports))
    for line in [*warnings, *shortages(reports)]:
        print(f"warning: {line}", file=sys.stderr)
    if faults:
        for fault in faults[1:]:
            print(f"also: {fault}", file=sys.stderr)
        raise RaytrainError(faults[0])


@contextlib.contextmanager
def _written(job: Job, use_gpu: bool, one_machine: bool) -> Iterator[Probe]:
    """A file in the run directory for the nodes to read."""
    content = uuid.uuid4().hex
    file = job.run_dir / f".preflight-{content}"
    try:
        job.run_dir.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="utf-8")
    except OSError as error:
        raise RaytrainError(
            f"cannot write {job.run_dir}: {error.strerror}; "
            "make room or rights there, or give another --run-dir"
        ) from error
    try:
        yield Probe(file, content, job.shards.uri, job.shards.fingerprint, use_gpu, one_machine)
    finally:
        file.unlink(missing_ok=True)


def ask(
    nodes: Sequence[Mapping[str, Any]], probe: Probe, limit_seconds: float
) -> tuple[list[NodeReport], list[str], list[str]]:
    """Let each node look at itself, by a task that takes none of its CPUs.

    Args:
        nodes: of ``ray.nodes()``.
        probe: what to look at.
        limit_seconds: how long to wait for all of them.

    Returns:
        The reports in the order of the nodes, faults and warnings.
    """
    task = ray.remote(num_cpus=0, max_retries=0)(examine)
    asked = {}
    for node in nodes:
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        answer = task.options(scheduling_strategy=there).remote(probe, node["NodeManagerAddress"])
        asked[answer] = node
    reports: dict[str, NodeReport] = {}
    faults, warnings = [], []
    deadline = time.monotonic() + limit_seconds
    waiting = list(asked)
    while waiting:
        left = max(0.0, deadline - time.monotonic())
        ready, waiting = ray.wait(waiting, num_returns=1, timeout=left)
        if not ready:
            break
        node = asked[ready[0]]
        try:
            report: NodeReport = ray.get(ready[0])
        except ray.exceptions.RayTaskError as error:
            faults.append(
                f"node {_name(node)} can't run raytrain: {_last_line(error)}; "
                "install the same on all nodes (cluster/README.md)"
            )
        except ray.exceptions.RayError as error:  # it went away: training copes with that
            warnings.append(f"node {_name(node)} wasn't checked: {_last_line(error)}")
        else:
            reports[node["NodeID"]] = replace(report, skew=report.clock - time.time())
    for answer in waiting:  # not cancelled: that can abort this process, see prepare
        warnings.append(
            f"node {_name(asked[answer])} didn't answer in {limit_seconds:.0f} s and wasn't checked"
        )
    return [reports[n["NodeID"]] for n in nodes if n["NodeID"] in reports], faults, warnings


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _name(node: Mapping[str, Any]) -> str:
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"


def differences(reports: Sequence[NodeReport]) -> list[str]:
    """Faults: versions unlike those of the first report, and clocks unlike the driver's."""
    faults = []
    for report in reports[1:]:
        first = reports[0]
        for name in sorted({*first.versions, *report.versions}):
            has, other = report.versions.get(name, "none"), first.versions.get(name, "none")
            if has != other:
                faults.append(
                    f"node {report.node} has {name} {has}, node {first.node} has {other}; "
                    "install the same on all nodes (cluster/README.md)"
                )
        if abs(report.skew) > MOST_SKEW_SECONDS:
            faults.append(
                f"node {report.node}: its clock is {abs(report.skew):.0f} s "
                f"{'ahead' if report.skew > 0 else 'behind'}; let it keep time by NTP (chrony)"
            )
    return faults


def gpu_faults(reports: Sequence[NodeReport], archs: Sequence[str]) -> list[str]:
    """Faults: GPUs for which torch has no kernels, old drivers, GPUs and drivers that differ.

    Args:
        reports: of all nodes; those without GPUs don't matter.
        archs: ``torch.cuda.get_arch_list()``; empty where torch doesn't tell.
    """
    faults = []
    with_gpus = [report for report in reports if report.gpus]
    for report in with_gpus:
        for gpu in report.gpus:
            fault = (
                kernel_fault(gpu.name, gpu.capability, archs, report.versions["torch"])
                or _driver_fault(gpu, report.versions)
                or _unlike_fault(gpu, with_gpus[0])
            )
            if fault:
                faults.append(f"node {report.node}: {fault}")
                break  # its other GPUs would say the same
    return faults


def _driver_fault(gpu: Gpu, versions: Mapping[str, str]) -> str | None:
    cuda = versions.get("cuda", "0")
    oldest = OLDEST_DRIVER.get(int(cuda.split(".")[0]), 0)
    if int(_branch(gpu)) >= oldest:
        return None
    return f"driver {gpu.driver} is too old for torch's CUDA {cuda}; install {oldest} or newer"


def _unlike_fault(gpu: Gpu, first: NodeReport) -> str | None:
    measure = first.gpus[0]
    if gpu.name != measure.name:
        return (
            f"has a {gpu.name}, node {first.node} has a {measure.name}; all workers would go at "
            "the pace of the slowest: use nodes of one kind"
        )
    if _branch(gpu) != _branch(measure):
        return (
            f"has driver {gpu.driver}, node {first.node} has {measure.driver}; "
            "install the same branch"
        )
    return None


def _branch(gpu: Gpu) -> str:
    return gpu.driver.split(".")[0]


def shortages(reports: Sequence[NodeReport]) -> list[str]:
    """Warnings of disks and shared memory that are nearly full."""
    return [
        f"node {report.node}: {free / 2**20:.0f} MB free for {name}"
        + ("; give the container more (--shm-size)" if name == "/dev/shm" else "; make room")  # noqa: S108
        for report in reports
        for name, free in report.free.items()
        if free < LEAST_FREE_BYTES
    ]


def table(reports: Sequence[NodeReport]) -> Table:
    """The nodes, one a row, under the versions of the first; only what differs is in its row."""
    common = reports[0].versions if reports else {}
    grid = Table(title="pre-flight: " + ", ".join(f"{n} {v}" for n, v in sorted(common.items())))
    places = list(reports[0].free) if reports else []
    grid.add_column("node", no_wrap=True)
    for name in ("GPUs", "driver", *(f"{place} free" for place in places), "clock", "differs"):
        grid.add_column(name, overflow="fold")
    for report in reports:
        kinds = sorted({gpu.name for gpu in report.gpus})
        grid.add_row(
            report.node,
            f"{len(report.gpus)} x {', '.join(kinds)}" if kinds else "",
            ", ".join(sorted({gpu.driver for gpu in report.gpus})),
            *(f"{report.free[p] / 2**30:.0f} GB" if p in report.free else "" for p in places),
            f"{report.skew:+.1f} s",
            ", ".join(f"{n} {v}" for n, v in report.versions.items() if common.get(n) != v),
        )
    return grid
