"""`raytrain data check`: is a ShardSet what its manifest says, and fit to train on?"""

from __future__ import annotations

import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import PurePosixPath

import pyarrow as pa
import simplejpeg
from rich.box import SIMPLE_HEAD
from rich.table import Table

from raytrain.data.shards import SCHEMA, SPLITS, ShardFile, ShardSet, Size, size_name
from raytrain.data.storage import DamageError, first_line, read_row_group

_NAMED = 5  # images of a group of equal ones that are named


@dataclass(frozen=True)
class Finding:
    """Something that a person should know, in one line.

    Attributes:
        text: names the split and the image, or the file.
        is_wrong: False where it may well be meant so.
    """

    text: str
    is_wrong: bool = True


@dataclass(frozen=True, slots=True)
class _Image:
    """A row as it was read from the largest size that is whole.

    Attributes:
        split: ``train`` or ``val``.
        key: the source path.
        label: index of its class.
        file: hash of the stored JPEG.
        pixels: hash of its pixels and shape; None where it can't be decoded.
    """

    split: str
    key: str
    label: int
    file: bytes
    pixels: bytes | None


def check_set(
    shards: ShardSet,
    threads: int | None = None,
    advance: Callable[[int], None] | None = None,
) -> list[Finding]:
    """Read all of a ShardSet and say what is wrong with it.

    Every file is compared with its checksum, every image decoded in every size, labels compared
    with the manifest's classes and counts and with the class folders in the keys, and images with
    equal pixels found: in both splits (a leak), under two classes, or merely twice.

    Args:
        shards: the set. Each thread holds one of its files in memory.
        threads: how many; by default one a core.
        advance: called with each number of images done.

    Raises:
        RaytrainError: the storage can't be reached.
    """
    jobs = [
        (split, number)
        for split in SPLITS
        for number in range(len(shards.manifest.splits[split].shards))
    ]
    findings: list[Finding] = []
    images: list[_Image] = []
    with ThreadPoolExecutor(threads or os.cpu_count() or 1) as pool:
        for found, rows in pool.map(lambda job: _check_shard(shards, *job), jobs):
            findings += found
            images += rows
            if advance is not None:
                advance(len(rows))
    if len(images) == sum(shards.num_images(split) for split in SPLITS):
        findings += _check_counts(shards, images)
    findings += _check_labels(shards, images)
    findings += _check_keys(images)
    findings += _check_duplicates(shards, images)
    return findings


def balance_table(shards: ShardSet) -> Table:
    """A row a split: images, and the smallest and the largest class."""
    table = Table(box=SIMPLE_HEAD, show_edge=False)
    for header in ("split", "images", "classes", "smallest class", "largest class", "ratio"):
        table.add_column(header, justify="left" if "class" in header else "right")
    for name in SPLITS:
        counts = shards.manifest.splits[name].class_counts
        least, most = min(counts), max(counts)
        table.add_row(
            name,
            f"{sum(counts):,}",
            f"{len(counts):,}",
            f"{shards.classes[counts.index(least)]}: {least:,}",
            f"{shards.classes[counts.index(most)]}: {most:,}",
            f"{most / least:.2f}" if least else "-",
        )
    return table


def _check_shard(shards: ShardSet, split: str, number: int) -> tuple[list[Finding], list[_Image]]:
    """Check one shard in all its sizes, the largest first: its images stand for the others."""
    shard = shards.manifest.splits[split].shards[number]  # type: ignore[index]
    findings: list[Finding] = []
    first: list[_Image] = []
    done: set[str] = set()
    for size in reversed(shards.sizes):
        file = shard.files[size_name(size)]
        if file.path in done:  # sizes share a file where nothing was shrunk
            continue
        done.add(file.path)
        found, images = _check_file(shards, split, size, file, shard.rows)
        findings += found
        if first and images:
            findings += _compare(first, images, shards.folder.address(file.path))
        first = first or images
    return findings, first


def _compare(largest: list[_Image], images: list[_Image], where: str) -> Iterator[Finding]:
    """Hold the rows of one size against those of the largest: same images, same order."""
    pairs = enumerate(zip(largest, images, strict=True))
    other = [(row, a, b) for row, (a, b) in pairs if (a.key, a.label) != (b.key, b.label)]
    if other:
        row, a, b = other[0]
        yield Finding(
            f"{where}: {len(other)} rows differ from the largest size, the first is row {row}: "
            f"{b.key} with label {b.label}, there {a.key} with label {a.label}"
        )


def _check_file(
    shards: ShardSet, split: str, size: Size, file: ShardFile, rows: int
) -> tuple[list[Finding], list[_Image]]:
    """Check one file; no images are returned where it isn't whole."""
    where = shards.folder.address(file.path)
    findings: list[Finding] = []
    try:
        content = shards.folder.read(file.path)
    except FileNotFoundError:
        return [Finding(f"{where}: missing, though the manifest names it")], []
    except OSError as error:
        return [Finding(f"{where}: cannot be read ({first_line(error)})")], []
    if hashlib.sha256(content).hexdigest() != file.sha256:
        findings.append(Finding(f"{where}: its SHA-256 isn't the manifest's; it has changed"))
    images: list[_Image] = []
    block_rows = shards.manifest.block_rows
    for block, start in enumerate(range(0, rows, block_rows)):
        number = min(block_rows, rows - start)
        try:
            table = read_row_group(pa.BufferReader(content), block, number, SCHEMA)
        except DamageError as damage:
            findings.append(Finding(f"{where}: block {block} is damaged ({damage})"))
            continue
        for row in table.to_pylist():
            images.append(_decode(split, row, size, findings))
    return findings, images if len(images) == rows else []


def _decode(split: str, row: dict[str, object], size: Size, findings: list[Finding]) -> _Image:
    jpeg, key, label = row["image"], row["key"], row["label"]
    assert isinstance(jpeg, bytes)
    assert isinstance(key, str)
    assert isinstance(label, int)
    where = f"{split}: {key}, size {size_name(size)}"
    pixels: bytes | None = None
    try:
        decoded = simplejpeg.decode_jpeg(jpeg, colorspace="RGB")
    except ValueError as error:
        findings.append(Finding(f"{where}: can't be decoded ({first_line(error)})"))
    else:
        height, width, _ = decoded.shape
        if (width, height) != (row["width"], row["height"]):
            findings.append(
                Finding(
                    f"{where}: is {width} x {height} pixels, its row says "
                    f"{row['width']} x {row['height']}"
                )
            )
        pixels = _hash(f"{width} {height} ".encode() + decoded.tobytes())
    return _Image(split, key, label, _hash(jpeg), pixels)


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _check_counts(shards: ShardSet, images: Iterable[_Image]) -> Iterator[Finding]:
    found = Counter((image.split, image.label) for image in images)
    for split in SPLITS:
        for label, said in enumerate(shards.manifest.splits[split].class_counts):
            if (number := found[split, label]) != said:
                yield Finding(
                    f"{split}: class {shards.classes[label]} has {number} images, the manifest "
                    f"says {said}"
                )


def _check_labels(shards: ShardSet, images: Iterable[_Image]) -> Iterator[Finding]:
    """Compare labels with the classes and, where a key lies in a class folder, with that."""
    known = set(shards.classes)
    astray: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for image in images:
        name = _class_name(shards, image)
        if name not in known:
            yield Finding(
                f"{image.split}: {image.key}: has {name}, but there are {len(known)} classes"
            )
            continue
        folders = known.intersection(PurePosixPath(image.key).parts[:-1])
        if folders and name not in folders:
            astray[image.split, name, min(folders)].append(image.key)
    for (split, name, folder), keys in astray.items():
        yield Finding(
            f"{split}: {len(keys)} images labelled {name} come from the class folder {folder}, "
            f"such as {keys[0]}"
        )


def _check_keys(images: Iterable[_Image]) -> Iterator[Finding]:
    times = Counter((image.split, image.key) for image in images)
    for (split, key), number in times.items():
        if number > 1:
            yield Finding(f"{split}: {key}: is in it {number} times")


def _check_duplicates(shards: ShardSet, images: Iterable[_Image]) -> Iterator[Finding]:
    groups: dict[bytes, list[_Image]] = defaultdict(list)
    for image in images:
        if image.pixels is not None:
            groups[image.pixels].append(image)
    for unsorted in groups.values():
        if len(unsorted) == 1:
            continue
        group = sorted(unsorted, key=lambda image: (image.split, image.key))
        leaks = len({image.split for image in group}) > 1
        torn = len({image.label for image in group}) > 1
        what = "in train and val" if leaks else "under two classes" if torn else "twice"
        alike = "files" if len({image.file for image in group}) == 1 else "pixels"
        named = [
            f"{image.split} {image.key}" + (f" ({_class_name(shards, image)})" if torn else "")
            for image in group[:_NAMED]
        ]
        more = f" and {len(group) - _NAMED} more" if len(group) > _NAMED else ""
        yield Finding(
            f"the same image {what}, equal {alike}: {', '.join(named)}{more}",
            is_wrong=leaks or torn,
        )


def _class_name(shards: ShardSet, image: _Image) -> str:
    known = 0 <= image.label < len(shards.classes)
    return shards.classes[image.label] if known else f"label {image.label}"
