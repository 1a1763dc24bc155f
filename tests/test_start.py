"""Starting a Ray of our own, where Ray's own start fails."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from raytrain.errors import RaytrainError
from raytrain.orchestrate.cluster import ensure_ray

LATE = "The current node timed out during startup.\nThis could happen because"


class Init:
    """In place of ``ray.init``: raises what it is given, one error a call."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.calls: list[dict[str, Any]] = []

    def __call__(self, **options: Any) -> None:
        self.calls.append(options)
        if self.errors:
            raise self.errors.pop(0)


@pytest.fixture(autouse=True)
def not_running(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)


def test_a_late_start_is_tried_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    init = Init(Exception(LATE))
    monkeypatch.setattr(ray, "init", init)
    ensure_ray(workers=2, spare=1)
    assert len(init.calls) == 2
    assert init.calls[0] == init.calls[1]
    assert init.calls[0]["num_cpus"] >= 3


def test_who_never_starts_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "init", Init(Exception(LATE), Exception(LATE)))
    with pytest.raises(RaytrainError, match=r"timed out during startup\.; try again") as told:
        ensure_ray()
    assert "\n" not in str(told.value)


def test_a_cluster_that_isnt_there_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    init = Init(ConnectionError("no answer"))
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(RaytrainError, match=r"RAY_ADDRESS=10\.0\.0\.1:6379: no answer; check"):
        ensure_ray()
    assert len(init.calls) == 1
