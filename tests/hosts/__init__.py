"""Private hosts: Linux namespaces with SSH servers, which behave like machines of a network.

No name, address, mount or process of theirs is seen outside, and all end with the test.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(sys.executable).parent
"""Folder of raytrain and ray."""
SHARED = Path("/mnt/raytrain")
"""Where desk and hosts have the one folder that they share."""

_PACKAGES = {"sshd": "openssh-server", "ssh": "openssh-client", "rsync": "rsync", "ip": "iproute2"}
"""Program -> Debian's package of it."""

_LIMIT_S = 1000
"""For what takes a minute on two cores: a shared machine may be ten times slower."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Hosts:
    """A desk, where a user sits, and hosts h0, h1, ... that are reached from there by SSH.

    Attributes:
        folder: of keys and logs; its ``shared`` is what desk and hosts see as /mnt/raytrain.
        pid: of the process that holds the desk's namespaces.
    """

    folder: Path
    pid: int

    @property
    def shared(self) -> Path:
        return self.folder / "shared"

    @property
    def key(self) -> Path:
        return self.folder / "key"

    def at_desk(self, *command: str | Path) -> list[str]:
        """A command as it is called to run at the desk."""
        enter = ["nsenter", f"--target={self.pid}", "--net", "--mount", "--ipc"]
        enter.append(f"--pid=/proc/{self.pid}/ns/pid_for_children")
        path = f"PATH={PROGRAMS}:{os.environ['PATH']}"
        user = ["env", "HOME=/home/raytrain", path, "RAY_AUTH_MODE=token"]
        return [*enter, *user, *map(str, command)]

    def on(self, host: int, line: str) -> list[str]:
        """A line of bash as it is called to run on a host, with what its .bashrc exports."""
        options = ["StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR"]
        ssh = ["ssh", "-i", str(self.key), *(part for option in options for part in ("-o", option))]
        return self.at_desk(*ssh, f"raytrain@10.77.0.{host + 2}", f". ~/.bashrc; {line}")

    def cut(self, host: int) -> None:
        """Take a host's cable out of the switch."""
        check(self.at_desk("ip", "link", "set", f"h{host}", "down"))

    def mend(self, host: int) -> None:
        """Put it back in."""
        check(self.at_desk("ip", "link", "set", f"h{host}", "up"))


class Phases:
    """Times of a test's phases, written down as each ends.

    Args:
        file: the log; replaced.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        file.parent.mkdir(exist_ok=True)
        file.write_text("")
        self._first = self._began = time.monotonic()

    def end(self, phase: str) -> None:
        """A phase has ended, and the next begins."""
        now = time.monotonic()
        self.note(f"{now - self._began:6.1f} s  at {now - self._first:6.1f} s  {phase}")
        self._began = now

    def note(self, line: str) -> None:
        """Something else to be remembered."""
        with self.file.open("a") as log:
            log.write(f"{line}\n")

    def text(self) -> str:
        """All of it."""
        return self.file.read_text()


@contextmanager
def private_hosts(folder: Path, count: int) -> Iterator[Hosts]:
    """Start hosts; where that can't be done, skip the test and say why.

    Args:
        folder: for their keys, logs and shared folder.
        count: how many.
    """
    _need_tools()
    for name in ("key", "hostkey"):
        check(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)])
    keep = {ROOT, Path(sys.prefix), Path(sys.base_prefix), *map(Path, sys.path)}
    command = ["setpriv", "--pdeathsig=KILL", "unshare", "--net", "--mount", "--ipc", "--pid"]
    command += ["--fork", "--kill-child", "--mount-proc"]
    command += ["bash", str(Path(__file__).with_name("hosts.sh")), "desk", str(folder), str(count)]
    command += sorted(str(path) for path in keep if path.is_dir())
    log = folder / "hosts.log"
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            hosts = Hosts(folder, process.pid)
            wait_for(lambda: (folder / "ready").exists() or process.poll() is not None)
            assert process.poll() is None, log.read_text()
            for host in range(count):
                wait_for(lambda host=host: answers(hosts.on(host, "true")))  # type: ignore[misc]
            yield hosts
        finally:
            process.kill()  # its namespaces end with it, and all that runs in them


def answers(command: Sequence[str]) -> bool:
    """Whether a command succeeds."""
    return (
        subprocess.run(command, capture_output=True, check=False, timeout=_LIMIT_S).returncode == 0
    )


def check(command: Sequence[str]) -> str:
    """Run a command that must succeed; gives what it wrote."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        timeout=_LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}"
    return done.stdout


def wait_for(ask: Callable[[], _T], every_s: float = 0.5) -> _T:
    """Ask until the answer is true; gives it. Fails after a time that only a fault takes."""
    deadline = time.monotonic() + _LIMIT_S
    while not (answer := ask()):
        assert time.monotonic() < deadline, f"not within {_LIMIT_S} s"
        time.sleep(every_s)
    return answer


def _need_tools() -> None:
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("private hosts need Linux and root")
    if shutil.which("unshare") is None or not answers(["unshare", "--net", "--mount", "true"]):
        pytest.skip("private hosts need namespaces, and this container may make none")
    missing = [package for program, package in _PACKAGES.items() if not _find(program)]
    if missing and not _install(missing):
        pytest.skip(f"private hosts need {', '.join(missing)}: apt-get install them")


def _find(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin")


def _install(packages: list[str]) -> bool:
    """Install Debian packages where that starts no server: on a machine without systemd."""
    if Path("/run/systemd/system").exists() or shutil.which("apt-get") is None:
        return False
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    with Path(tempfile.gettempdir(), "raytrain-tests-apt").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another test process may be at it
        for command in (["update"], ["install", "--yes", "--no-install-recommends", *packages]):
            subprocess.run(["apt-get", "-qq", *command], env=environment, check=False, timeout=240)
    return all(map(_find, _PACKAGES))
