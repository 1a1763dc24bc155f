"""What all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def ray_local() -> Iterator[None]:
    """Keep one local Ray for all tests that need one; its 8 CPUs are a number, not cores."""
    import ray

    if ray.is_initialized():
        yield
        return
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
