"""Reading from a real S3 server on loopback, through faults that pass and faults that last."""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from raytrain.data import storage
from raytrain.data.check import check_set
from raytrain.data.shards import MANIFEST, ShardSet, Size
from raytrain.data.storage import DamageError, Folder, is_passing, read_row_group
from raytrain.errors import RaytrainError
from raytrain.recipe.types import Input
from tests import s3
from tests.s3 import Fault, FaultyProxy, S3Server
from tests.sets import flip_bit, write_set

UNCACHED = Input(cache="none")


@pytest.fixture(scope="module")
def local(drawn_images: Path, tmp_path_factory: pytest.TempPathFactory) -> ShardSet:
    return write_set(drawn_images, tmp_path_factory.mktemp("local") / "set")


@pytest.fixture(scope="module")
def server(local: ShardSet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3.run_server(tmp_path_factory.mktemp("s3")) as running:
        running.upload(Path(local.uri), "set")
        yield running


@pytest.fixture
def proxy(server: S3Server) -> Iterator[FaultyProxy]:
    proxy = FaultyProxy(server.port)
    yield proxy
    proxy.close()


@pytest.fixture(autouse=True)
def tester(monkeypatch: pytest.MonkeyPatch) -> None:
    sign_in(monkeypatch, s3.KEY, s3.SECRET)


def sign_in(monkeypatch: pytest.MonkeyPatch, key: str, secret: str) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    storage._locate.cache_clear()


def content(shards: ShardSet, size: Size = 16) -> list[pa.Table]:
    return [
        shards.read_block(split, size, block, with_keys=True)
        for split in ("train", "val")
        for block in shards.blocks(split)
    ]


def error_of(action: Callable[[], object]) -> str:
    with pytest.raises(RaytrainError) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_set_on_s3_is_the_local_one(server: S3Server, local: ShardSet) -> None:
    there = ShardSet.open(server.uri("set"), UNCACHED)
    assert there.fingerprint == local.fingerprint
    for size in local.sizes:
        assert content(there, size) == content(local, size)
    assert check_set(there) == []


def test_what_is_cached_is_not_asked_for_again(
    proxy: FaultyProxy, server: S3Server, local: ShardSet, tmp_path: Path
) -> None:
    there = ShardSet.open(server.uri("set", proxy.port), Input(cache_dir=str(tmp_path)))
    blocks = there.blocks("val")
    before = proxy.requests
    first = [there.read_block("val", 16, block) for block in blocks]
    assert proxy.requests == before + 3 * len(blocks)  # its size, its footer, its columns
    before = proxy.requests
    assert [there.read_block("val", 16, block) for block in blocks] == first
    assert first == [local.read_block("val", 16, block) for block in blocks]
    assert proxy.requests == before


def test_passing_faults_are_waited_out(
    proxy: FaultyProxy, server: S3Server, local: ShardSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults: list[Fault] = ["reset", "503", "hang up"]
    there = ShardSet(server.uri("set", proxy.port), local.manifest, UNCACHED)
    block = there.blocks("train")[0]
    proxy.faults.extend(faults * 11)  # more than the SDK alone puts up with
    monkeypatch.setattr(storage, "FIRST_WAIT_SECONDS", 0.01)
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    assert there.read_block("train", 16, block) == local.read_block("train", 16, block)
    assert waits
    assert not proxy.faults


class Gone:
    """A file system whose server doesn't answer."""

    def open_input_file(self, path: str) -> None:
        raise OSError(
            f"When reading information for key '{path}' in bucket 'b': AWS Error "
            "NETWORK_CONNECTION during HeadObject operation: curlCode: 7, Could not connect to "
            "server; Details: Failed to connect to 127.0.0.1:1 after 0 ms"
        )


def test_a_server_that_stays_away_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_locate", lambda _: (Gone(), "pictures/set"))
    there = Folder("s3://pictures/set?region=eu-west-1")
    assert error_of(lambda: there.read(MANIFEST, patience=0.0)) == (
        "s3://pictures/set/manifest.json: no answer in 0 s (Failed to connect to 127.0.0.1:1 "
        "after 0 ms); check the address and the network, then run the same command to go on"
    )


def test_what_is_missing_is_named(server: S3Server, local: ShardSet) -> None:
    assert "no ShardSet here (manifest.json is missing)" in error_of(
        lambda: ShardSet.open(server.uri("nothing"))
    )
    elsewhere = server.uri("set").replace(s3.BUCKET, "paintings")
    assert "there is no bucket paintings" in error_of(lambda: ShardSet.open(elsewhere))
    gone = ShardSet(server.uri("nothing"), local.manifest, UNCACHED)
    assert "s3://pictures/nothing/train/16/00000.parquet: missing" in error_of(
        lambda: content(gone)
    )


@pytest.mark.parametrize(
    ("key", "secret"), [(s3.OTHER_KEY, s3.OTHER_SECRET), (s3.KEY, "wrong"), ("unknown", "x")]
)
def test_lack_of_rights_is_told_at_once(
    key: str, secret: str, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    sign_in(monkeypatch, key, secret)
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("tried again"))
    message = error_of(lambda: ShardSet.open(server.uri("set")))
    assert message.startswith("s3://pictures/set/manifest.json: access denied (ACCESS_DENIED")
    assert "AWS_ACCESS_KEY_ID" in message


def test_credentials_in_an_address_are_refused(server: S3Server) -> None:
    uri = server.uri("set").replace("s3://", "s3://someone:hidden@")
    message = error_of(lambda: ShardSet.open(uri))
    assert "AWS_ACCESS_KEY_ID" in message
    assert "hidden" not in message


def test_damage_on_the_way_is_read_again(
    proxy: FaultyProxy, server: S3Server, local: ShardSet
) -> None:
    there = ShardSet(server.uri("set", proxy.port), local.manifest, UNCACHED)
    block = there.blocks("train")[0]
    proxy.flips = 1
    assert there.read_block("train", None, block) == local.read_block("train", None, block)
    assert proxy.flips == 0


def test_damage_at_the_source_is_named(server: S3Server, local: ShardSet, tmp_path: Path) -> None:
    file = "val/16/00000.parquet"
    (tmp_path / "set" / file).parent.mkdir(parents=True)
    (tmp_path / "set" / file).write_bytes(local.folder.read(file))
    flip_bit(tmp_path / "set" / file, 100)
    server.upload(tmp_path / "set", "damaged")
    there = ShardSet(server.uri("damaged"), local.manifest, Input(cache_dir=str(tmp_path / "c")))
    block = there.blocks("val")[0]
    assert "s3://pictures/damaged/val/16/00000.parquet: cannot read block 0" in error_of(
        lambda: there.read_block("val", 16, block)
    )
    assert not list((tmp_path / "c/blocks").iterdir())


def test_every_flipped_bit_is_found_or_harmless(local: ShardSet) -> None:
    """One bit in each byte of a whole small shard: no pixel or label changes unseen."""
    file = local.manifest.splits["val"].shards[-1].files["16"]
    content = local.folder.read(file.path)
    rows = local.manifest.splits["val"].shards[-1].rows
    groups = [min(16, rows - start) for start in range(0, rows, 16)]
    schema = local.read_block("val", 16, local.blocks("val")[0]).schema

    def read(data: bytes) -> list[pa.Table]:
        return [
            read_row_group(pa.BufferReader(data), index, number, schema)
            for index, number in enumerate(groups)
        ]

    whole, found = read(content), 0
    footer = len(content) - 2048
    for position in [*range(0, footer, 23), *range(footer, len(content))]:
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 8
        try:
            assert read(bytes(damaged)) == whole, position
        except DamageError:
            found += 1
    assert found > footer // 23 // 2


def test_waits_grow_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    longest: list[float] = []
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        waits.append(seconds)
        now += seconds

    def upper_end(_: float, high: float) -> float:
        longest.append(high)
        return high

    def fail() -> None:
        raise ConnectionResetError(errno.ECONNRESET, "reset by peer")

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(random, "uniform", upper_end)
    with pytest.raises(ConnectionResetError):
        storage._persist(fail, patience=60)
    assert longest[:7] == [0.5, 1, 2, 4, 8, 15, 15]
    assert waits == [0.5, 1, 2, 4, 8, 15, 15]
    assert now <= 60


S3_FAULT = "When reading information for key 'k' in bucket 'b': AWS Error {} during HeadObject"


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (OSError(S3_FAULT.format("NETWORK_CONNECTION") + ": curlCode: 28, Timeout"), True),
        (OSError(S3_FAULT.format("SLOW_DOWN")), True),
        (OSError(S3_FAULT.format("UNKNOWN (HTTP status 503)")), True),
        (OSError(S3_FAULT.format("UNKNOWN (HTTP status 429)")), True),
        (OSError(errno.ESTALE, "Stale file handle"), True),
        (TimeoutError("timed out"), True),
        (OSError(S3_FAULT.format("ACCESS_DENIED")), False),
        (OSError(S3_FAULT.format("UNKNOWN (HTTP status 400)")), False),
        (FileNotFoundError("no such key"), False),
        (PermissionError("not yours"), False),
        (OSError("CRC checksum verification failed"), False),
    ],
)
def test_which_faults_pass(error: OSError, passes: bool) -> None:
    assert is_passing(error) == passes
