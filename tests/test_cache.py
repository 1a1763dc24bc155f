"""The cache of blocks: shared, bounded, and in nobody's way after a kill. Damage and its rules."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytrain.data import cache as module
from raytrain.data import reader
from raytrain.data.cache import NodeCache, Wanted, cache_for, warn_once
from raytrain.data.reader import TrainingImages
from raytrain.data.shards import ShardSet
from raytrain.errors import RaytrainError
from raytrain.recipe.load import recipe_from_dict
from raytrain.recipe.plan import Plan
from raytrain.recipe.types import Input
from tests.sets import flip_bit, write_set

SCHEMA = pa.schema([pa.field("image", pa.binary(), nullable=False)])


def table(number: int, size: int = 10_000) -> pa.Table:
    return pa.table({"image": [bytes([number]) * size]}, schema=SCHEMA)


def wanted(key: str) -> Wanted:
    return Wanted(key, 1, SCHEMA)


def never() -> pa.Table:
    raise AssertionError("fetched, though it is here")


def held(cache: NodeCache) -> dict[str, int]:
    """Bytes of each copy."""
    return {p.stem: p.stat().st_size for p in (cache.folder / "blocks").iterdir()}


@pytest.fixture
def cache(tmp_path: Path) -> NodeCache:
    return NodeCache.open(tmp_path / "cache", max_bytes=10**6)


@pytest.fixture(autouse=True)
def warn_again() -> None:
    warn_once.cache_clear()


def test_fetched_once(cache: NodeCache) -> None:
    assert cache.get(wanted("a"), lambda: table(1)) == table(1)
    assert cache.get(wanted("a"), never) == table(1)
    again = NodeCache.open(cache.folder, max_bytes=10**6)
    assert again.get(wanted("a"), never) == table(1)
    assert cache.get(wanted("b"), lambda: table(2)) == table(2)


def test_threads_that_want_the_same_block_wait_for_one_fetch(cache: NodeCache) -> None:
    fetches: list[int] = []
    go_on = Event()

    def fetch() -> pa.Table:
        fetches.append(1)
        go_on.wait(10)
        return table(1)

    with ThreadPoolExecutor(4) as pool:
        results = [pool.submit(cache.get, wanted("a"), fetch) for _ in range(4)]
        go_on.set()
        assert all(result.result() == table(1) for result in results)
    assert len(fetches) == 1


PROCESS = """
import pathlib, sys, time
import pyarrow as pa, pyarrow.parquet as pq
from raytrain.data.cache import NodeCache, Wanted
schema = pa.schema([pa.field("image", pa.binary(), nullable=False)])
def table(number):
    return pa.table({"image": [bytes([number]) * 10_000]}, schema=schema)
def wanted(key):
    return Wanted(key, 1, schema)
cache = NodeCache.open(pathlib.Path(sys.argv[1]), max_bytes=10**6)
"""

FETCH_ALL = """
print("ready", flush=True)
sys.stdin.readline()
def fetch(number):
    with open(sys.argv[2], "a") as log:
        log.write(f"{number}\\n")
    time.sleep(0.02)
    return table(number)
for number in range(10):
    assert cache.get(wanted(str(number)), lambda: fetch(number)) == table(number)
"""


def start(code: str, *arguments: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", PROCESS + code, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def line_of(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    return process.stdout.readline()


def test_processes_that_start_together_fetch_each_block_once(
    cache: NodeCache, tmp_path: Path
) -> None:
    processes = [start(FETCH_ALL, cache.folder, tmp_path / "log") for _ in range(3)]
    assert [line_of(process) for process in processes] == [b"ready\n"] * 3
    for process in processes:
        process.communicate(b"go\n", timeout=600)
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sorted((tmp_path / "log").read_text().split()) == list("0123456789")
    assert int((cache.folder / "used").read_text()) == sum(held(cache).values())


FETCH_AND_HANG = """
cache.get(wanted("kept"), lambda: table(1))
def write_half(table, path, **options):
    pathlib.Path(path).write_bytes(b"half")
    (cache.folder / "used").write_text("")
    print("writing", flush=True)
    time.sleep(60)
pq.write_table = write_half
cache.get(wanted("lost"), lambda: table(2))
"""


def test_a_kill_leaves_nothing_in_the_way(cache: NodeCache) -> None:
    with start(FETCH_AND_HANG, cache.folder) as process:
        assert line_of(process) == b"writing\n"
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    began = time.monotonic()
    assert cache.get(wanted("kept"), never) == table(1)
    assert cache.get(wanted("lost"), lambda: table(2)) == table(2)
    assert cache.get(wanted("lost"), never) == table(2)
    assert time.monotonic() - began < 30  # didn't wait for the dead one's lock
    assert not list(cache.folder.glob("locks/*.tmp"))
    assert int((cache.folder / "used").read_text()) == sum(held(cache).values())


def test_the_least_recently_used_make_room(tmp_path: Path) -> None:
    cache = NodeCache.open(tmp_path, max_bytes=5 * 11_000)
    for number in range(5):
        cache.get(wanted(str(number)), lambda number=number: table(number))  # type: ignore[misc]
        os.utime(tmp_path / f"blocks/{number}.parquet", (number, number))
    cache.get(wanted("0"), never)  # used again
    cache.get(wanted("new"), lambda: table(9))
    left = held(cache)
    assert sum(left.values()) <= cache.max_bytes
    assert {"0", "new"} <= set(left)
    assert "1" not in left
    for number in range(10, 40):
        cache.get(wanted(str(number)), lambda number=number: table(number))  # type: ignore[misc]
        assert sum(held(cache).values()) <= cache.max_bytes


def test_a_copy_in_use_is_read_to_its_end(tmp_path: Path) -> None:
    cache = NodeCache.open(tmp_path, max_bytes=12_000)
    cache.get(wanted("a"), lambda: table(1))
    with pa.OSFile(str(tmp_path / "blocks/a.parquet")) as open_copy:
        cache.get(wanted("b"), lambda: table(2))
        assert set(held(cache)) == {"b"}
        assert pq.read_table(open_copy) == table(1)


def test_a_block_over_the_budget_is_passed_on(tmp_path: Path) -> None:
    cache = NodeCache.open(tmp_path, max_bytes=15_000)
    cache.get(wanted("a"), lambda: table(1))
    assert cache.get(wanted("big"), lambda: table(2, 50_000)).nbytes > 50_000
    assert set(held(cache)) == {"a"}


@pytest.mark.parametrize("spoil", ["flip", "cut", "other rows"])
def test_a_damaged_copy_is_fetched_anew(cache: NodeCache, spoil: str) -> None:
    cache.get(wanted("a"), lambda: table(1))
    copy = cache.folder / "blocks/a.parquet"
    if spoil == "flip":
        flip_bit(copy, 5000)
    elif spoil == "cut":
        copy.write_bytes(copy.read_bytes()[:5000])
    else:
        pq.write_table(pa.concat_tables([table(1), table(1)]), copy)
    assert cache.get(wanted("a"), lambda: table(1)) == table(1)
    assert cache.get(wanted("a"), never) == table(1)


def test_a_full_disk_costs_the_copy_only(
    cache: NodeCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pq, "write_table", fail)
    for _ in range(2):
        assert cache.get(wanted("a"), lambda: table(1)) == table(1)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "can't keep blocks (No space left on device)" in caplog.text


def test_folders_that_will_not_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RaytrainError, match=r"input\.cache: .*file/x can't be made"):
        NodeCache.open(tmp_path / "file/x", 1)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(RaytrainError, match="belongs to another user"):
        NodeCache.open(tmp_path / "foreign", 1)


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(module, "_SHARED_MEMORY", tmp_path)
    assert cache_for(Input(), is_remote=False) is None
    assert cache_for(Input(cache="none"), is_remote=True) is None
    far = cache_for(Input(), is_remote=True)
    assert far is not None
    assert far.folder == tmp_path / "xdg/raytrain/blocks"
    ram = cache_for(Input(cache="ram"), is_remote=True)
    assert ram is not None
    assert ram.folder == tmp_path / f"raytrain-{os.getuid()}"
    assert 0 < ram.max_bytes < far.max_bytes
    near = cache_for(Input(cache="disk", cache_dir=str(tmp_path / "own"), cache_gb=1.5), False)
    assert near == NodeCache(tmp_path / "own", 1_500_000_000)


@pytest.fixture
def shards(drawn_images: Path, tmp_path: Path) -> ShardSet:
    return write_set(drawn_images, tmp_path / "set", sizes=(16, 24, None))


def with_rules(shards: ShardSet, rules: Input) -> ShardSet:
    return ShardSet(shards.uri, shards.manifest, rules)


def damage(shards: ShardSet, size: str, shard: int = 0) -> Path:
    """Flip a bit in the first JPEG of a training shard."""
    file = Path(shards.uri, "train", size, f"{shard:05d}.parquet")
    flip_bit(file, 200)
    return file


def test_cached_blocks_outlive_their_source(shards: ShardSet, tmp_path: Path) -> None:
    kept = with_rules(shards, Input(cache="disk", cache_dir=str(tmp_path / "cache")))
    blocks = shards.blocks("train")
    first = [kept.read_block("train", 16, block) for block in blocks]
    damage(shards, "16").rename(tmp_path / "away")
    assert [kept.read_block("train", 16, block) for block in blocks] == first
    flip_bit(next((tmp_path / "cache/blocks").glob("*-0.parquet")), 300)
    (tmp_path / "away").rename(Path(shards.uri, "train/16/00000.parquet"))
    flip_bit(Path(shards.uri, "train/16/00000.parquet"), 200)  # whole again
    assert [kept.read_block("train", 16, block) for block in blocks] == first


def test_damage_stops_the_reading(shards: ShardSet) -> None:
    file = damage(shards, "16")
    with pytest.raises(RaytrainError, match=f"{file}: cannot read block 0 .*CRC"):
        shards.read_block("train", 16, shards.blocks("train")[0])


def test_damage_is_skipped_by_another_size(
    shards: ShardSet, caplog: pytest.LogCaptureFixture
) -> None:
    skipping = with_rules(shards, Input(damaged="skip"))
    block = shards.blocks("train")[0]
    larger = shards.read_block("train", 24, block, with_keys=True)
    whole = shards.read_block("train", 16, block, with_keys=True)
    file = damage(shards, "16")
    for _ in range(2):
        assert skipping.read_block("train", 16, block, with_keys=True) == larger
    assert larger["key"] == whole["key"]
    assert larger["label"] == whole["label"]
    assert [record.getMessage() for record in caplog.records] == [
        f"{file}: cannot read block 0 (could not verify page integrity, CRC checksum "
        "verification failed for page_ordinal 0); copy the file again or prepare the set anew; "
        "read from size 24 instead"
    ]
    damage(shards, "24")
    assert skipping.read_block("train", 24, block)["width"][0].as_py() >= 32  # the original
    damage(shards, "original")
    with pytest.raises(RaytrainError, match=str(file)):
        skipping.read_block("train", 16, block)


RECIPE = {
    "model": {"name": "not.used:here"},
    "phases": [{"epochs": 1, "image_px": 14, "batch": 64}],
    "schedule": {"lr": 0.1},
}


def test_a_step_loses_no_image_where_damage_is_skipped(
    shards: ShardSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_cache", reader._BlockCache(1))  # so that all is read anew
    plan = Plan(recipe_from_dict(RECIPE), shards.num_images("train"))

    def batches() -> list[tuple[list[int], list[int]]]:
        skipping = with_rules(shards, Input(damaged="skip"))
        steps = range(plan.num_steps)
        read = TrainingImages(skipping, plan).read(steps)
        return [(batch.rows.tolist(), batch.labels.tolist()) for batch in read]

    whole = batches()
    for number in range(len(shards.manifest.splits["train"].shards)):
        damage(shards, "16", number)
    assert batches() == whole
    assert sorted(row for rows, _ in whole for row in rows) == list(range(331))
