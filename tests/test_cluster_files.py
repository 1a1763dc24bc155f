"""The files in cluster/: that Ray and our own check take them, and that their scripts work."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from raytrain.orchestrate.cluster_check import check_cluster_file

ROOT = Path(__file__).parents[1]
CLUSTER = ROOT / "cluster"
FILES = sorted(CLUSTER.glob("*.yaml"))
LAUNCHER_FILES = [file for file in FILES if file.name != "raycluster.yaml"]


def test_there_is_a_file_for_each_kind_of_cluster() -> None:
    assert {file.stem for file in FILES} == {
        "aws-v100-16x8", "aws-h100-8", "gcp-v100-16x8", "onprem", "raycluster",
    }  # fmt: skip


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_check_finds_nothing(file: Path) -> None:
    assert check_cluster_file(file) == []


@pytest.mark.parametrize("file", LAUNCHER_FILES, ids=lambda file: file.stem)
def test_ray_takes_it(file: Path) -> None:
    # what `ray up` does before it asks a cloud; Ray offers no public way to it
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(yaml.safe_load(file.read_text(encoding="utf-8"))))


@pytest.mark.parametrize("name", ["constraints-v100.txt", "constraints-cu130.txt"])
def test_constraints_pin_all_that_raytrain_installs(name: str) -> None:
    lines = (CLUSTER / name).read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    version = {canonicalize_name(pin.name): next(iter(pin.specifier)).version for pin in pins}
    assert all(str(pin.specifier).startswith("==") for pin in pins)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for line in (*project["dependencies"], *project["optional-dependencies"]["timm"]):
        needed = Requirement(line)
        has = version.get(canonicalize_name(needed.name))
        assert has in needed.specifier if has else False, (
            f"{name} has {needed.name} {has}, pyproject.toml wants {line}: make it anew as the "
            "head of constraints-v100.txt says"
        )


def test_v100_gets_the_last_torch_with_kernels_for_it() -> None:
    text = (CLUSTER / "constraints-v100.txt").read_text(encoding="utf-8")
    for pin in ("torch==2.10.0", "torchvision==0.25.0", "nvidia-cuda-runtime-cu12==12.8.90"):
        assert re.search(rf"^{re.escape(pin)}$", text, re.MULTILINE), pin


@pytest.mark.parametrize("file", LAUNCHER_FILES, ids=lambda file: file.stem)
def test_commands_name_what_is_mounted(file: Path) -> None:
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    home = f"/home/{content['auth']['ssh_user']}"
    mounts = content["file_mounts"]
    commands = " ".join(
        str(command) for name in content if name.endswith("_commands") for command in content[name]
    )
    for script in re.findall(r"~/cluster/(node/[\w-]+\.sh)", commands):
        assert (CLUSTER / script).is_file(), script
    for wheel in re.findall(r"~/(raytrain-[\w.-]+\.whl)", commands):
        assert mounts[f"{home}/{wheel}"] == f"dist/{wheel}"
    assert mounts[f"{home}/cluster"] == "cluster"
    assert mounts[f"{home}/.ray/auth_token"] == "~/.ray/auth_token"


# --- the scripts, with made-up tools in place of those that change a machine


class Machine:
    """A home and a PATH of made-up tools; every call of one is a line in `calls`."""

    def __init__(self, folder: Path) -> None:
        self.home, self.tools, self._log = folder / "home", folder / "bin", folder / "calls"
        for made in (self.home, self.tools):
            made.mkdir()
        self._log.touch()

    def tool(self, name: str, script: str = "", at: Path | None = None) -> None:
        """Put a bash script in place of a tool."""
        path = at or self.tools / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'#!/bin/bash\necho "{name} $*" >> {self._log}\n{script}\n')
        path.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        return self._log.read_text(encoding="utf-8").splitlines()

    def bash(self, command: str, **env: str) -> subprocess.CompletedProcess[str]:
        path = f"{self.tools}:{os.environ['PATH']}"
        return subprocess.run(
            ["bash", "-c", command],
            env={"PATH": path, "HOME": str(self.home), **env},
            capture_output=True, text=True, check=False, cwd=self.home,
        )  # fmt: skip


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


AWS_LINKS = "10.0.0.1 dev ens5 src 10.0.0.7 uid 1000"
ADDRESS = "2: ens5    inet 10.0.0.7/20 brd 10.0.15.255 scope global ens5"


def network(machine: Machine, provider: str, **env: str) -> subprocess.CompletedProcess[str]:
    return machine.bash(
        f". {CLUSTER}/node/network.sh {provider} && "
        'echo "$NCCL_SOCKET_IFNAME $GLOO_SOCKET_IFNAME $NODE_IP"',
        **env,
    )


def test_a_worker_takes_the_interface_on_the_way_to_the_head(machine: Machine) -> None:
    machine.tool("ip", f'case "$*" in *route*) echo "{AWS_LINKS}";; *) echo "{ADDRESS}";; esac')
    assert network(machine, "aws", RAY_HEAD_IP="10.0.0.1").stdout == "=ens5 ens5 10.0.0.7\n"
    assert machine.calls == ["ip -4 -o route get 10.0.0.1", "ip -4 -o addr show dev ens5"]


def test_a_head_without_a_route_out_takes_its_first_global_address(machine: Machine) -> None:
    machine.tool("ip", f'case "$*" in *route*) ;; *) echo "{ADDRESS}";; esac')
    assert network(machine, "onprem").stdout == "=ens5 ens5 10.0.0.7\n"


def test_an_interface_without_an_address_is_an_error(machine: Machine) -> None:
    machine.tool("ip")
    done = network(machine, "gcp", RAYTRAIN_INTERFACE="ib7")
    assert (done.returncode, done.stdout) == (1, "")
    assert "ib7" in done.stderr


def test_an_unknown_provider_is_an_error(machine: Machine) -> None:
    machine.tool("ip", f'echo "{ADDRESS}"')
    done = network(machine, "asw", RAYTRAIN_INTERFACE="ens5")
    assert done.returncode == 1
    assert "asw" in done.stderr


def install(machine: Machine) -> subprocess.CompletedProcess[str]:
    machine.tool("nvidia-smi")  # there is a driver
    venv = machine.home / "venv" / "bin"
    machine.tool("python3.12", f"mkdir -p {venv}")
    machine.tool("python", at=venv / "python")
    (machine.home / "raytrain.whl").touch()
    script = CLUSTER / "node" / "install.sh"
    return machine.bash(f"bash {script} constraints-v100.txt ~/raytrain.whl boto3")


def test_install_pins_and_runs_twice_without_harm(machine: Machine) -> None:
    machine.tool("pip", at=machine.home / "venv" / "bin" / "pip")
    first, second = install(machine), install(machine)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr
    installs = [call for call in machine.calls if call.startswith("pip install --quiet --con")]
    assert installs[0] == (
        f"pip install --quiet --constraint {CLUSTER}/constraints-v100.txt "
        f"{machine.home}/raytrain.whl[timm] ray[default] boto3"
    )
    path_line = "export PATH=$HOME/venv/bin:$PATH\n"
    assert (machine.home / ".bashrc").read_text(encoding="utf-8") == path_line


def test_install_fails_when_pip_does(machine: Machine) -> None:
    machine.tool("pip", "exit 3", at=machine.home / "venv" / "bin" / "pip")
    assert install(machine).returncode == 3
    assert not (machine.home / ".bashrc").exists()


def test_install_says_what_is_missing(machine: Machine) -> None:
    done = machine.bash(f"bash {CLUSTER}/node/install.sh constraints-v100.txt ~/absent.whl")
    assert done.returncode == 1
    assert "absent.whl is missing" in done.stderr


def test_a_worker_mounts_the_heads_folder_once(machine: Machine, tmp_path: Path) -> None:
    machine.tool("sudo", "[ $1 = mount ] && touch mounted; exit 0")
    machine.tool("mountpoint", "[ -e mounted ]")
    machine.tool("mount.nfs4")
    command = f"bash {CLUSTER}/node/mount-shared.sh {tmp_path}"
    for _ in range(2):
        assert machine.bash(command, RAY_HEAD_IP="10.0.0.1").returncode == 0
    mounts = [call for call in machine.calls if call.startswith("sudo mount ")]
    assert mounts == [f"sudo mount -t nfs4 -o hard,noatime 10.0.0.1:{tmp_path} {tmp_path}"]


def test_a_mount_that_fails_is_an_error(machine: Machine, tmp_path: Path) -> None:
    machine.tool("sudo", "[ $1 != mount ]")
    machine.tool("mountpoint", "exit 1")
    machine.tool("mount.nfs4")
    command = f"bash {CLUSTER}/node/mount-shared.sh {tmp_path}"
    assert machine.bash(command, RAY_HEAD_IP="10.0.0.1").returncode != 0
