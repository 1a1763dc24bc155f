"""What a node says of itself: versions, GPUs, storage, data, network, disks.

It loads neither torch nor Ray's libraries, so that a fresh process answers soon.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import re
import shutil
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from raytrain.data.shards import ShardSet
from raytrain.errors import RaytrainError
from raytrain.run.record import package_versions

_LOOPBACK = "127."


@dataclass(frozen=True)
class Gpu:
    """A GPU, as the driver names it. `capability` is (7, 0) for a V100."""

    name: str
    driver: str
    capability: tuple[int, int]


@dataclass(frozen=True)
class Probe:
    """What a node is to look at.

    Attributes:
        file: a file in the run directory, written by the driver.
        content: what it must hold.
        data: address of the ShardSet.
        fingerprint: which ShardSet it must be.
        use_gpu: whether training uses GPUs.
        one_machine: whether all nodes are on one machine, so that nothing goes over a network.
    """

    file: Path
    content: str
    data: str
    fingerprint: str
    use_gpu: bool
    one_machine: bool


@dataclass(frozen=True)
class NodeReport:
    """What a node says of itself.

    Attributes:
        node: host name and address.
        versions: of raytrain, ray, torch, python and cuda.
        gpus: all that its driver knows.
        free: free bytes of the run directory, /dev/shm and the folder for temporary files.
        faults: what makes it unfit, each with the mend.
        clock: Unix time on it when it answered, in seconds.
        skew: how far its clock is ahead of the driver's, in seconds.
    """

    node: str
    versions: Mapping[str, str]
    gpus: tuple[Gpu, ...]
    free: Mapping[str, int]
    faults: tuple[str, ...]
    clock: float
    skew: float = 0.0


def examine(probe: Probe, address: str) -> NodeReport:
    """Look at the machine that this runs on.

    Args:
        probe: what to look at.
        address: its address in the Ray cluster.
    """
    found = [_storage_fault(probe), _data_fault(probe)]
    if not probe.one_machine:
        found.append(nccl_fault() if probe.use_gpu else gloo_fault(address))
    folders = {"run dir": probe.file.parent, "/dev/shm": Path("/dev/shm"),  # noqa: S108
               "temp dir": Path(tempfile.gettempdir())}  # fmt: skip
    return NodeReport(
        node=f"{socket.gethostname()} ({address})",
        versions=package_versions(_torch_cuda()),
        gpus=_gpus(),
        free={name: shutil.disk_usage(at).free for name, at in folders.items() if at.is_dir()},
        faults=tuple(fault for fault in found if fault),
        clock=time.time(),
    )


def _storage_fault(probe: Probe) -> str | None:
    folder = probe.file.parent
    mend = "give a --run-dir on storage that all nodes mount"
    try:
        content = probe.file.read_text(encoding="utf-8")
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".preflight-") as mine:
            mine.write(b"x")
    except OSError as error:
        return (
            f"the run directory {folder} can't be read and written there: {error.strerror}; {mend}"
        )
    return None if content == probe.content else f"{folder} is another folder there; {mend}"


def _data_fault(probe: Probe) -> str | None:
    try:
        shards = ShardSet.open(probe.data)
        if shards.fingerprint != probe.fingerprint:
            return f"{probe.data} is another ShardSet there; copy the same to all nodes"
        shards.read_block("train", shards.sizes[0], shards.blocks("train")[0])
    except RaytrainError as error:
        if probe.one_machine:
            return str(error)
        return f"{error}; or put it where all nodes reach it, such as s3://"
    return None


def nccl_fault() -> str | None:
    """Why NCCL would find no interface: it takes one by itself unless it is told which."""
    told = os.environ.get("NCCL_SOCKET_IFNAME")
    if not told or told.startswith("^"):  # ^: any but these
        return None
    own, names = _addresses(), told.lstrip("=").split(",")
    whole = told.startswith("=")  # else names are beginnings of names
    if any(has == name if whole else has.startswith(name) for has in own for name in names):
        return None
    return f"NCCL_SOCKET_IFNAME={told}: it has {', '.join(own)} only; correct that"


def gloo_fault(address: str) -> str | None:
    """Why Gloo's peers couldn't reach this node.

    Gloo takes the interface that it is told, else the address that the host name resolves to, and
    falls back to the loopback interface.

    Args:
        address: of this node in the Ray cluster.
    """
    own = _addresses()
    right = next((name for name, ip in own.items() if ip == address), "eth0")
    mend = f"export GLOO_SOCKET_IFNAME={right} before `ray start` there"
    if told := os.environ.get("GLOO_SOCKET_IFNAME"):
        if any(own.get(name, _LOOPBACK).startswith(_LOOPBACK) for name in told.split(",")):
            return f"GLOO_SOCKET_IFNAME={told}: no interface to other nodes; {mend}"
        return None
    name = socket.gethostname()
    try:
        resolved = socket.gethostbyname(name)
    except OSError:
        return f"its name {name} doesn't resolve, so other nodes can't reach its workers; {mend}"
    if resolved.startswith(_LOOPBACK) or resolved not in own.values():
        return f"its name {name} resolves to {resolved}, where no other node reaches it; {mend}"
    return None


def _addresses() -> dict[str, str]:
    """Interface -> its first IPv4 address."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(
                    asking.fileno(), 0x8915, request
                )  # SIOCGIFADDR of netdevice(7)
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def _gpus() -> tuple[Gpu, ...]:
    """Asked of the driver's own tool: torch sees no GPU in a task that has none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    query = [tool, "--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False)  # noqa: S603
    if answer.returncode != 0:
        return ()
    rows = [[part.strip() for part in line.split(",")] for line in answer.stdout.splitlines()]
    return tuple(
        Gpu(name, driver, (int(capability.split(".")[0]), int(capability.split(".")[1])))
        for name, driver, capability in rows
    )


def _torch_cuda() -> str | None:
    """torch.version.cuda, without the seconds that loading torch takes."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    match = re.search(r"^cuda\b.*= '([\d.]+)'", text, re.MULTILINE)
    return match[1] if match else None
