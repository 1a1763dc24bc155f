"""What all tests share: one local Ray, and a small set of drawn images."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.sets import write_set

LONG_FILES = (  # first, so that none of them is left to one process at the end
    "test_ray.py",
    "test_sweep.py",
    "test_real_hosts.py",
    "test_notebooks.py",
    "test_jobs.py",
    "test_demo.py",
    "test_stream.py",
    "test_elastic.py",
)
SHAPES = ("circle", "cross", "square", "stripes")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the long files first; `--no-loadscope-reorder` keeps them there."""
    place = {name: i for i, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


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


@pytest.fixture(scope="session")
def drawn_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder ``train/<class>``, ``val/<class>`` of 331 and 103 drawn images of 32 to 40 px."""
    folder = tmp_path_factory.mktemp("drawn")
    rng = np.random.default_rng(7)
    for split, number in (("train", 331), ("val", 103)):
        for i in range(number):
            name = SHAPES[i % len(SHAPES)]
            path = folder / split / name / f"{i:03d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            cv2.imwrite(str(path), draw(name, rng))
    return folder


@pytest.fixture(scope="session")
def drawn_set(drawn_images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The drawn images as a ShardSet with sizes 16 and original, in blocks of 16 rows."""
    out = tmp_path_factory.mktemp("sets") / "drawn"
    write_set(drawn_images, out)
    return out


def draw(shape: str, rng: np.random.Generator) -> NDArray[np.uint8]:
    """An image of a shape on noise, uint8 (height, width, 3)."""
    height, width = rng.integers(32, 41, 2)
    image = rng.integers(0, 60, (height, width, 3), dtype=np.uint8)
    centre = (int(rng.integers(12, 20)), int(rng.integers(12, 20)))
    colour = tuple(int(c) for c in rng.integers(120, 256, 3))
    if shape == "circle":
        cv2.circle(image, centre, 8, colour, 2)
    elif shape == "square":
        cv2.rectangle(
            image, (centre[0] - 7, centre[1] - 7), (centre[0] + 7, centre[1] + 7), colour, 2
        )
    elif shape == "cross":
        cv2.line(image, (centre[0] - 9, centre[1]), (centre[0] + 9, centre[1]), colour, 2)
        cv2.line(image, (centre[0], centre[1] - 9), (centre[0], centre[1] + 9), colour, 2)
    else:
        for y in range(4, int(height), 8):
            cv2.line(image, (0, y), (int(width), y), colour, 2)
    return image
