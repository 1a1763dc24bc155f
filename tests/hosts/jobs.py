"""Ray jobs, seen by a user: submitted by Ray's command line, looked at by its HTTP interface."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.hosts import answers, check, wait_for

SERVER = "http://127.0.0.1:8265"

RECIPE = """
model: {name: "mine:slow_cnn"}
phases: [{epochs: 6, image_px: 16, batch: 64}]
schedule: {lr: 1.0e-6}
input: {audit: true, window_blocks: 6}
log: {every_steps: 5}
validation: {every_epochs: 6}
"""
MODEL = '''
import pathlib
import time

from torch import nn


class Wait(nn.Module):
    """Makes training steps last as long as a large network's, until a test wants to see the end."""

    def forward(self, x):
        if self.training and not pathlib.Path("/mnt/raytrain/hurry").exists():
            time.sleep(0.5)
        return x


def slow_cnn(num_classes):
    return nn.Sequential(
        Wait(), nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, num_classes),
    )
'''

_ASK = """
import pathlib, sys, urllib.error, urllib.request
token = pathlib.Path("~/.ray/auth_token").expanduser()
header = {"Authorization": f"Bearer {token.read_text()}"} if sys.argv[2:] else {}
try:
    answer = urllib.request.urlopen(urllib.request.Request(sys.argv[1], headers=header), timeout=60)
    print(answer.status, answer.read().decode())
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
"""


def write_folder(folder: Path) -> None:
    """A user's working directory, with recipe and model."""
    folder.mkdir()
    (folder / "mine.yaml").write_text(RECIPE)
    (folder / "mine.py").write_text(MODEL)


@dataclass(frozen=True)
class Jobs:
    """The job server of a cluster.

    Attributes:
        called: a command as it is called where the user is.
        folder: the user's, with recipe and model, as it is called there.
    """

    called: Callable[[list[str]], list[str]]
    folder: Path

    def submit(self, job: str, *entrypoint: str) -> None:
        """Submit the folder and a command."""
        options = ["--no-wait", "--submission-id", job, "--address", SERVER]
        options += ["--working-dir", str(self.folder)]
        check(self.called(["ray", "job", "submit", *options, "--", *entrypoint]))

    def stop(self, job: str) -> None:
        """Stop a job and wait for its end."""
        check(self.called(["ray", "job", "stop", "--address", SERVER, job]))

    def info(self, job: str) -> dict[str, Any]:
        """What the server says of a job."""
        status, text = self.ask(f"/api/jobs/{job}")
        assert status == 200, text
        info: dict[str, Any] = json.loads(text)
        return info

    def log(self, job: str) -> str:
        """What the job's command wrote."""
        status, text = self.ask(f"/api/jobs/{job}/logs")
        assert status == 200, text
        log: str = json.loads(text)["logs"]
        return log.partition("Running entrypoint for job ")[2].partition("\n")[2]

    def wait(self, job: str) -> dict[str, Any]:
        """Wait for a job's end; gives what the server says of it."""
        ends = ("SUCCEEDED", "FAILED", "STOPPED")
        wait_for(lambda: self.info(job)["status"] in ends, every_s=1)
        return self.info(job)

    def can_be_asked(self) -> bool:
        """Whether the server is there."""
        return answers(self._asking("/api/version"))

    def ask(self, path: str, with_token: bool = True) -> tuple[int, str]:
        """Status and text of the server's answer."""
        status, _, text = check(self._asking(path, with_token)).partition(" ")
        return int(status), text.strip()

    def _asking(self, path: str, with_token: bool = True) -> list[str]:
        token = ["token"] if with_token else []
        return self.called([sys.executable, "-c", _ASK, f"{SERVER}{path}", *token])
