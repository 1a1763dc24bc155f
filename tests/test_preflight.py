"""Pre-flight: what a node says of itself, and what the driver makes of it."""

from __future__ import annotations

import io
import socket
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from rich.console import Console

from raytrain.data.shards import ShardSet
from raytrain.errors import RaytrainError
from raytrain.inline import check_kernels
from raytrain.orchestrate import node_report
from raytrain.orchestrate import preflight as module
from raytrain.orchestrate.node_report import Gpu, NodeReport, Probe, examine, gloo_fault, nccl_fault
from raytrain.orchestrate.preflight import (
    ask,
    differences,
    gpu_faults,
    preflight,
    shortages,
    table,
)
from raytrain.recipe.load import load_recipe
from raytrain.run.kernels import kernel_fault
from raytrain.train import Job

V100 = Gpu("Tesla V100-SXM2-16GB", "570.195.03", (7, 0))
H100 = Gpu("NVIDIA H100 80GB HBM3", "580.105.08", (9, 0))
VERSIONS = {
    "raytrain": "0.1.0",
    "ray": "2.60.0",
    "torch": "2.14.1",
    "python": "3.12.3",
    "cuda": "13.0",
}
CU128 = ("sm_70", "sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
CU130 = CU128[1:]


def report(node: str, **changed: Any) -> NodeReport:
    plenty = {"run dir": 2**40, "/dev/shm": 2**35}  # noqa: S108
    return replace(NodeReport(node, VERSIONS, (), plenty, (), time.time()), **changed)


@pytest.fixture
def probe(drawn_set: Path, tmp_path: Path) -> Probe:
    file = tmp_path / ".preflight-x"
    file.write_text("content")
    fingerprint = ShardSet.open(drawn_set).fingerprint
    return Probe(file, "content", str(drawn_set), fingerprint, use_gpu=False, one_machine=True)


# --- one node


def test_a_fit_node_says_what_it_is_and_leaves_nothing(probe: Probe) -> None:
    said = examine(probe, "10.0.0.7")
    assert said.faults == ()
    assert said.node == f"{socket.gethostname()} (10.0.0.7)"
    assert {"raytrain", "ray", "torch", "python"} <= set(said.versions)
    assert said.free["run dir"] > 0
    assert abs(said.clock - time.time()) < 5
    assert [path.name for path in probe.file.parent.iterdir() if path.is_file()] == [".preflight-x"]


def test_cuda_is_that_of_torch(probe: Probe) -> None:
    import torch

    assert examine(probe, "10.0.0.7").versions.get("cuda") == torch.version.cuda


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"file": Path("/nonexistent/.preflight-x")}, "can't be read and written"),
        ({"content": "of another run"}, "another folder"),
        ({"data": "/nonexistent"}, "no ShardSet here"),
        ({"fingerprint": "0"}, "another ShardSet"),
    ],
)
def test_storage_and_data_that_a_node_lacks(
    probe: Probe, changed: dict[str, Any], said: str
) -> None:
    (fault,) = examine(replace(probe, **changed), "10.0.0.7").faults
    assert said in fault
    assert "\n" not in fault


GPU_LINES = """\
Tesla V100-SXM2-16GB, 570.195.03, 7.0
Tesla V100-SXM2-16GB, 570.195.03, 7.0
"""


def test_gpus_are_those_that_the_driver_names(
    probe: Probe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\ncat <<E\n{GPU_LINES}E\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=":")
    assert examine(probe, "10.0.0.7").gpus == (V100, V100)


# --- its network


@pytest.fixture
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host `gpu3` with lo, eth0 and ib0, as it answers."""
    own = {"lo": "127.0.0.1", "eth0": "10.0.0.7", "ib0": "10.1.0.7"}
    monkeypatch.setattr(node_report, "_addresses", lambda: own)
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu3")
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("interfaces")
@pytest.mark.parametrize(
    ("resolved", "said"),
    [("10.0.0.7", None), ("127.0.1.1", "127.0.1.1"), ("10.9.9.9", "10.9.9.9"), (None, "resolve")],
)
def test_a_host_name_must_lead_to_the_host(
    resolved: str | None, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gethostbyname(_: str) -> str:
        if resolved is None:
            raise socket.gaierror
        return resolved

    monkeypatch.setattr(socket, "gethostbyname", gethostbyname)
    fault = gloo_fault("10.0.0.7")
    if said is None:
        assert fault is None
    else:
        assert fault is not None
        assert said in fault
        assert "export GLOO_SOCKET_IFNAME=eth0 before `ray start`" in fault


@pytest.mark.usefixtures("interfaces")
@pytest.mark.parametrize(("told", "fit"), [("ib0", True), ("eth1", False), ("lo", False)])
def test_gloo_s_interface_must_lead_elsewhere(
    told: str, fit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", told)
    assert (gloo_fault("10.0.0.7") is None) == fit


@pytest.mark.usefixtures("interfaces")
@pytest.mark.parametrize(
    ("told", "fit"),
    [("", True), ("eth", True), ("=eth", False), ("=eth0", True), ("^docker", True), ("en", False)],
)
def test_nccl_s_interface_must_be_there(
    told: str, fit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", told)
    assert (nccl_fault() is None) == fit


def test_interfaces_are_found_with_their_addresses() -> None:
    assert node_report._addresses()["lo"] == "127.0.0.1"


# --- what the reports say together


def test_nodes_that_are_alike_have_no_faults() -> None:
    alike = [report("a", gpus=(H100,)), report("b", gpus=(H100, H100)), report("head")]
    assert differences(alike) == []
    assert gpu_faults(alike, CU130) == []
    assert shortages(alike) == []


@pytest.mark.parametrize("name", sorted(VERSIONS))
def test_another_version_is_a_fault_that_names_the_node(name: str) -> None:
    faults = differences([report("a"), report("b", versions=VERSIONS | {name: "9"}), report("c")])
    assert faults == [
        f"node b has {name} 9, node a has {VERSIONS[name]}; "
        "install the same on all nodes (cluster/README.md)"
    ]


@pytest.mark.parametrize(("skew", "said"), [(11.0, "11 s ahead"), (-60.0, "60 s behind")])
def test_a_clock_apart_is_a_fault(skew: float, said: str) -> None:
    (fault,) = differences([report("a"), report("b", skew=skew)])
    assert fault.startswith("node b: ")
    assert said in fault


def test_a_v100_needs_a_torch_with_kernels_for_it() -> None:
    assert kernel_fault(V100.name, V100.capability, CU128, "2.10.0") is None
    fault = kernel_fault(V100.name, V100.capability, CU130, "2.14.1")
    assert fault is not None
    assert "torch 2.14.1 has no kernels for its Tesla V100-SXM2-16GB (sm_70)" in fault
    assert "constraints-v100.txt" in fault


@pytest.mark.parametrize(
    ("capability", "archs", "runs"),
    [
        ((8, 9), ["sm_80"], True),  # later of the same family
        ((8, 0), ["sm_86"], False),
        ((9, 0), ["sm_80"], False),
        ((9, 0), ["compute_80"], True),  # compiled when first used
        ((9, 0), ["sm_90a"], True),
        ((10, 0), ["sm_90a"], False),
        ((12, 0), ["sm_120"], True),
        ((7, 0), [], True),  # torch doesn't tell
    ],
)
def test_kernels_and_capabilities(
    capability: tuple[int, int], archs: list[str], runs: bool
) -> None:
    assert (kernel_fault("G", capability, archs, "2.14.1") is None) == runs


def test_the_inline_engine_refuses_such_a_gpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: V100.name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: V100.capability)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: list(CU130))
    with pytest.raises(RaytrainError, match=r"^--device cuda:0: .*constraints-v100.txt"):
        check_kernels("cuda:0")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: list(CU128))
    check_kernels("cuda:0")


@pytest.mark.parametrize(
    ("gpu", "said"),
    [
        (replace(H100, name="NVIDIA A100"), "has a NVIDIA A100, node a has a NVIDIA H100"),
        (replace(H100, driver="590.1"), "has driver 590.1, node a has 580.105.08"),
        (replace(H100, driver="570.1"), "too old for torch's CUDA 13.0; install 580"),
        (replace(V100, driver="580.1"), "no kernels"),
    ],
)
def test_gpus_that_are_unfit_or_unlike(gpu: Gpu, said: str) -> None:
    (fault,) = gpu_faults([report("a", gpus=(H100,)), report("b", gpus=(gpu, gpu))], CU130)
    assert fault.startswith("node b: ")
    assert said in fault


def test_little_room_is_a_warning() -> None:
    little = {"/dev/shm": 64 * 2**20}  # noqa: S108
    (warning,) = shortages([report("a"), report("b", free=little)])
    assert warning == "node b: 64 MB free for /dev/shm; give the container more (--shm-size)"


def test_the_table_has_a_row_a_node() -> None:
    written = io.StringIO()
    other = report("b", skew=1.25, versions=VERSIONS | {"ray": "2.59.0"})
    grid = table([report("a", gpus=(V100,) * 8), other])
    Console(file=written, width=200).print(grid)
    text = written.getvalue()
    for part in ("8 x Tesla V100", "570.195.03", "ray 2.60.0", "1024 GB", "+1.2 s", "ray 2.59.0"):
        assert part in text, part


# --- on Ray


def nodes() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ray.nodes()
    return [node for node in found if node["Alive"]]


@pytest.mark.usefixtures("ray_local")
def test_a_task_on_each_node_looks_there(probe: Probe) -> None:
    reports, faults, warnings = ask(nodes(), replace(probe, content="other"), 60)
    assert (faults, warnings) == ([], [])
    (said,) = reports
    assert ["another folder" in fault for fault in said.faults] == [True]
    assert abs(said.skew) < 5


@pytest.mark.usefixtures("ray_local")
def test_a_node_that_is_gone_or_slow_is_warned_of(probe: Probe) -> None:
    gone = nodes()[0] | {"NodeID": uuid.uuid4().hex + uuid.uuid4().hex[:24]}
    reports, faults, warnings = ask([gone], probe, 60)
    assert (reports, faults) == ([], [])
    assert "wasn't checked" in warnings[0]
    reports, faults, warnings = ask(nodes(), probe, 0.0)
    assert (reports, faults) == ([], [])
    assert "didn't answer" in warnings[0]


@pytest.mark.usefixtures("ray_local")
def test_a_node_that_can_t_run_raytrain_is_a_fault(
    probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> NodeReport:
        raise ImportError("no module named raytrain")

    monkeypatch.setattr(module, "examine", broken)
    reports, (fault,), _ = ask(nodes(), probe, 60)
    assert reports == []
    assert "can't run raytrain: ImportError: no module named raytrain; install" in fault


@pytest.fixture
def job(drawn_set: Path, tmp_path: Path) -> Job:
    return Job(load_recipe("digits"), ShardSet.open(drawn_set), tmp_path / "run")


@pytest.mark.usefixtures("ray_local")
def test_a_fit_machine_passes_and_shows_its_table(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    preflight(job, use_gpu=False, verbose=True)
    assert "pre-flight" in capsys.readouterr().err
    assert list(job.run_dir.iterdir()) == []


@pytest.mark.usefixtures("ray_local")
def test_an_unfit_node_is_one_line_and_the_others_follow(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unfit = report("h3 (10.0.0.3)", faults=("its disk is gone", "its network too"))
    monkeypatch.setattr(module, "examine", lambda *_: unfit)
    with pytest.raises(RaytrainError, match=r"^node h3 \(10.0.0.3\): its disk is gone$"):
        preflight(job, use_gpu=False, verbose=False)
    assert capsys.readouterr().err == "also: node h3 (10.0.0.3): its network too\n"


@pytest.mark.usefixtures("ray_local")
def test_a_run_directory_that_can_t_be_made_is_one_line(job: Job, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RaytrainError, match=r"^cannot write .*--run-dir$"):
        preflight(replace(job, run_dir=tmp_path / "file" / "run"), use_gpu=False, verbose=False)


@pytest.mark.usefixtures("ray_local")
def test_a_v100_with_the_wheel_of_today_is_refused(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: list(CU130))
    monkeypatch.setattr(module, "examine", lambda *_: report("h1", gpus=(V100,) * 8))
    with pytest.raises(RaytrainError, match=r"sm_70.*constraints-v100.txt"):
        preflight(job, use_gpu=True, verbose=False)
