"""`raytrain prepare`: map a folder of images to a ShardSet with Ray.

One Ray task writes one shard in all sizes. Finished shards are noted under ``OUT/.partial``,
so that the same command goes on after a kill; ``manifest.json`` is written last, so that only
a whole ShardSet has one.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import cv2
import ray
from pydantic import BaseModel, ValidationError
from ray.exceptions import RayError, RayTaskError
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from raytrain.data.layout import LayoutOptions, Listing, list_images
from raytrain.data.shards import (
    MANIFEST,
    PARTIAL,
    SPLITS,
    JpegQuality,
    Manifest,
    Options,
    Shard,
    ShardSet,
    Size,
    Skipped,
    Split,
    size_name,
    sort_sizes,
)
from raytrain.data.write import (
    SAME_SIZE_QUALITY,
    STOP,
    ShardResult,
    ShardTask,
    describe_file,
    replace_durably,
    write_shard,
)
from raytrain.errors import RaytrainError
from raytrain.orchestrate.cluster import ensure_ray

DEFAULT_SIZES: tuple[Size, ...] = (160, 256, 352)
LARGE_SHARD_IMAGES = 2048
"""ImageNet at 160, 256 and 352 px: shards of about 30, 65 and 115 MB."""
FEWEST_SHARDS = 16
"""A small set still gets about this many, so that every worker has shards to prepare."""
SECONDS_BETWEEN_LINES = 10.0
_STOP_SECONDS = 30.0


@dataclass(frozen=True)
class PrepareOptions:
    """How to prepare a ShardSet.

    Attributes:
        sizes: short sides in pixels; None keeps the original size.
        val_fraction: share of each class, above 0 and below 1, held out for validation.
        val_labels: text or CSV file of ``file name, class`` for a flat validation folder.
        seed: decides which images are held out, and the order of the training images.
        quality: JPEG quality, 1 to 100, of resized images.
        shard_images: images of a shard; None chooses 2048, and fewer for small sets.
        block_rows: rows of a block, the unit in which a trainer reads.
        max_bad: share, 0 to 1, of a split's images that may be unusable.
    """

    sizes: tuple[Size, ...] = DEFAULT_SIZES
    val_fraction: float | None = None
    val_labels: Path | None = None
    seed: int = 0
    quality: int = 92
    shard_images: int | None = None
    block_rows: int = 64
    max_bad: float = 0.01

    def __post_init__(self) -> None:
        self.layout()  # checks its own options
        if not self.sizes or any(size is not None and size < 1 for size in self.sizes):
            raise RaytrainError("--sizes: give at least one short side of 1 pixel or more")
        if not 1 <= self.quality <= 100:
            raise RaytrainError(f"--quality {self.quality}: give a JPEG quality of 1 to 100")
        if self.shard_images is not None and self.shard_images < 1:
            raise RaytrainError(f"--shard-images {self.shard_images}: give 1 or more")
        if self.block_rows < 1:
            raise RaytrainError(f"--block-rows {self.block_rows}: give 1 or more")
        if not 0 <= self.max_bad <= 1:
            raise RaytrainError(f"--max-bad {self.max_bad}: give a share of 0 to 1")

    def layout(self) -> LayoutOptions:
        """Return the part that says how to read the source folder."""
        return LayoutOptions(self.val_fraction, self.val_labels, self.seed)

    def recorded(self) -> Options:
        """Return what decides the content of the ShardSet, as the manifest states it."""
        return {
            "sizes": ",".join(map(size_name, sort_sizes(self.sizes))),
            "val_fraction": self.val_fraction,
            "val_labels": str(self.val_labels.absolute()) if self.val_labels else None,
            "seed": self.seed,
            "quality": self.quality,
            "shard_images": self.shard_images,
            "block_rows": self.block_rows,
        }


def parse_sizes(text: str) -> tuple[Size, ...]:
    """Read sizes such as ``160,352,original``: short sides in pixels, in any order.

    Raises:
        RaytrainError: a size is neither a whole number above 0 nor ``original``.
    """
    sizes: list[Size] = []
    for word in (part.strip() for part in text.split(",")):
        if word != "original" and not (word.isascii() and word.isdigit() and int(word) > 0):
            raise RaytrainError(
                f"--sizes {text}: {word!r} is no size; give short sides in pixels or original, "
                "such as 160,352,original"
            )
        sizes.append(None if word == "original" else int(word))
    return tuple(sort_sizes(sizes))


def prepare(
    src: str | Path, out: str | Path, options: PrepareOptions, *, progress: bool = True
) -> ShardSet:
    """Prepare the images under `src` as a ShardSet in the new folder `out`.

    Both folders must be visible under the same path on every machine of the Ray cluster. A run
    that was stopped is continued by the same call. Where `out` already holds the whole set,
    nothing is done.

    Args:
        src: folder of images in one of the layouts of `raytrain.data.layout`.
        out: local folder to create.
        options: how to prepare.
        progress: show progress on standard error.

    Raises:
        RaytrainError: the source is not usable, more than ``options.max_bad`` of a split's
            images are not, or `out` holds something else or can't be written.
    """
    console = Console(stderr=True, quiet=not progress, soft_wrap=True)
    source, target = Path(src).expanduser().absolute(), Path(out).expanduser().absolute()
    _check_folders(source, target, str(out))
    listing = list_images(source, options.layout())
    plan = _make_plan(listing, target, options)
    if (target / MANIFEST).exists():
        done = ShardSet.open(target)
        _check_same_plan(target, plan, done.manifest.plan, done.manifest.options)
        console.print(f"{target} is already prepared with these options; nothing to do")
        return done
    start = time.monotonic()
    with _claim(target, plan) as partial:
        ensure_ray()
        results = _write_shards(plan, partial, console)
        manifest = _make_manifest(listing, plan, results)
        _write_json(target / MANIFEST, partial, manifest)
        shutil.rmtree(partial)
    counts = " and ".join(f"{split.num_images} {name}" for name, split in manifest.splits.items())
    console.print(
        f"{target}: {counts} images of {len(manifest.classes)} classes, "
        f"{len(manifest.skipped)} skipped, in {time.monotonic() - start:.1f} s"
    )
    return ShardSet.open(target)


@dataclass(frozen=True)
class _Plan:
    """What to write. The fingerprint stands for the source as listed and for the options."""

    tasks: tuple[ShardTask, ...]
    options: PrepareOptions
    fingerprint: str


class _PlanNote(BaseModel):
    """What ``.partial/plan.json`` remembers of the plan that was begun."""

    fingerprint: str
    options: Options


def _check_folders(source: Path, target: Path, out: str) -> None:
    if "://" in out:
        raise RaytrainError(
            f"{out}: prepare writes to a local folder; give one, then copy it to {out}"
        )
    if target.is_relative_to(source):
        raise RaytrainError(f"{target}: lies inside {source}; choose a folder outside the source")


def _make_plan(listing: Listing, target: Path, options: PrepareOptions) -> _Plan:
    digest = hashlib.sha256(json.dumps(options.recorded(), sort_keys=True).encode())
    tasks: list[ShardTask] = []
    for split, items in listing.splits.items():
        for key, label in items:
            path = listing.root / key
            try:
                status = path.stat()
            except OSError as error:
                raise RaytrainError(
                    f"{path}: vanished or became unreadable while the folder was listed "
                    f"({error.strerror}); run the same command again"
                ) from None
            facts = f"{split}:{label}:{status.st_size}:{status.st_mtime_ns}:{key}\n"
            digest.update(facts.encode())
        step = options.shard_images or _choose_shard_images(len(items), options.block_rows)
        tasks += [
            ShardTask(
                source=str(listing.root),
                out=str(target),
                split=split,
                index=index,
                items=items[start : start + step],
                sizes=tuple(sort_sizes(options.sizes)),
                quality=options.quality,
                block_rows=options.block_rows,
            )
            for index, start in enumerate(range(0, len(items), step))
        ]
    return _Plan(tuple(tasks), options, digest.hexdigest())


def _choose_shard_images(images: int, block_rows: int) -> int:
    """Return a number of images a shard that fills whole blocks."""
    wanted = min(LARGE_SHARD_IMAGES, math.ceil(images / FEWEST_SHARDS))
    return math.ceil(wanted / block_rows) * block_rows


def _check_same_plan(target: Path, plan: _Plan, fingerprint: str, options: Options) -> None:
    if fingerprint == plan.fingerprint:
        return
    changes = [
        f"{key} {options.get(key)} there, {value} now"
        for key, value in plan.options.recorded().items()
        if options.get(key) != value
    ]
    what = f"other options ({'; '.join(changes)})" if changes else "other source files"
    raise RaytrainError(
        f"{target}: was begun or made from {what}; choose another folder or remove this one"
    )


@contextmanager
def _claim(target: Path, plan: _Plan) -> Iterator[Path]:
    """Make `target` ours for this plan, or take up where a stopped run left it.

    Yields the folder of notes about finished shards.
    """
    partial = target / PARTIAL
    if target.exists() and not target.is_dir():
        raise RaytrainError(f"{target}: is a file; choose a folder to write to")
    try:
        if target.is_dir() and not partial.is_dir() and any(target.iterdir()):
            raise RaytrainError(
                f"{target}: not empty and no ShardSet; choose a new or an empty folder"
            )
        partial.mkdir(parents=True, exist_ok=True)
        with (partial / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RaytrainError(
                    f"{target}: another `raytrain prepare` is writing here; wait for it"
                ) from None
            _remember_plan(target, partial, plan)
            for abandoned in (partial / STOP, *partial.glob("*.tmp")):
                abandoned.unlink(missing_ok=True)
            yield partial
    except OSError as error:
        raise RaytrainError(
            f"{target}: cannot be written ({error.strerror or error}); make room, fix its "
            "permissions or choose another folder"
        ) from error


def _remember_plan(target: Path, partial: Path, plan: _Plan) -> None:
    path = partial / "plan.json"
    if path.exists():
        try:
            begun = _PlanNote.model_validate_json(path.read_bytes())
        except ValidationError:
            raise RaytrainError(f"{path}: damaged; remove {target} and start again") from None
        _check_same_plan(target, plan, begun.fingerprint, begun.options)
    else:
        note = _PlanNote(fingerprint=plan.fingerprint, options=plan.options.recorded())
        _write_json(path, partial, note)


def _write_json(path: Path, partial: Path, model: BaseModel) -> None:
    temporary = partial / f"{path.name}.tmp"
    with temporary.open("w", encoding="utf-8") as file:
        file.write(model.model_dump_json(indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    replace_durably(temporary, path)


def _write_shards(
    plan: _Plan, partial: Path, console: Console
) -> list[tuple[ShardTask, ShardResult]]:
    """Write all shards that are not there yet; return the results in the order of the plan."""
    images = Counter[str]()
    for task in plan.tasks:
        images[task.split] += len(task.items)
    results: dict[str, ShardResult] = {}
    bad: dict[str, list[Skipped]] = {split: [] for split in images}
    with (
        _progress(images.total(), console) as advance,
        closing(_run_tasks(plan.tasks, partial)) as finished,  # stops the rest after an error
    ):
        for task, result in finished:
            _write_json(partial / f"{task.name}.json", partial, result)
            results[task.name] = result
            bad[task.split] += result.skipped
            _check_bad(task.split, bad[task.split], images[task.split], plan.options.max_bad)
            advance(len(task.items))
    return [(task, results[task.name]) for task in plan.tasks]


def _run_tasks(
    tasks: Sequence[ShardTask], partial: Path
) -> Generator[tuple[ShardTask, ShardResult], None, None]:
    """Run tasks on the cluster, one a CPU, and yield each when it is done."""
    remote = ray.remote(num_cpus=1)(_write_unless_intact)
    waiting = iter(tasks)
    running: dict[Any, ShardTask] = {}
    try:
        while True:
            for task in itertools.islice(waiting, max(0, _cluster_cpus() - len(running))):
                running[remote.remote(task, _read_note(partial, task))] = task
            if not running:
                return
            ready, _ = ray.wait(list(running))
            for reference in ready:
                task = running.pop(reference)
                yield task, _get_result(reference, task)
    finally:
        if running:
            _stop_tasks(list(running), partial)


def _stop_tasks(running: list[Any], partial: Path) -> None:
    """Let the tasks see that they aren't wanted, and wait for their end.

    Not with ``ray.cancel``: Ray 2.60 aborts the process that cancels a task as its result arrives.
    """
    with suppress(OSError):  # the disk may be full: then they write their shards to the end
        (partial / STOP).touch()
    ray.wait(running, num_returns=len(running), timeout=_STOP_SECONDS)


def _cluster_cpus() -> int:
    resources: dict[str, float] = ray.cluster_resources()
    return max(1, int(resources.get("CPU", 1)))


def _write_unless_intact(task: ShardTask, noted: ShardResult | None) -> ShardResult:
    """Write a shard, unless a stopped run left it behind whole."""
    cv2.setNumThreads(1)  # the cluster has given us one CPU
    if noted is not None and _is_intact(task.out, noted):
        return noted
    return write_shard(task)


def _is_intact(out: str, noted: ShardResult) -> bool:
    try:
        return all(
            describe_file(Path(out, file.path), file.path) == file for file in noted.files.values()
        )
    except OSError:
        return False


def _read_note(partial: Path, task: ShardTask) -> ShardResult | None:
    try:
        return ShardResult.model_validate_json((partial / f"{task.name}.json").read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def _get_result(reference: Any, task: ShardTask) -> ShardResult:
    try:
        result: ShardResult = ray.get(reference)
        return result
    except RayTaskError as error:
        raise error.cause from error
    except RayError as error:
        raise RaytrainError(
            f"shard {task.name}: its Ray task failed ({str(error).splitlines()[0]}); run the "
            "same command to go on"
        ) from error


def _check_bad(split: str, bad: Sequence[Skipped], images: int, max_bad: float) -> None:
    if len(bad) <= max_bad * images:
        return
    few = ", ".join(f"{item.key} ({item.reason})" for item in bad[:3])
    raise RaytrainError(
        f"{len(bad)} or more of the {images} {split} images are unusable, which is over "
        f"--max-bad {max_bad}: {few}; repair or remove them, or allow more"
    )


def _make_manifest(
    listing: Listing, plan: _Plan, results: Sequence[tuple[ShardTask, ShardResult]]
) -> Manifest:
    skipped = tuple(item for _, result in results for item in result.skipped)
    bad = {item.key for item in skipped}
    splits: dict[Literal["train", "val"], Split] = {}
    for name in SPLITS:
        items = [item for item in listing.splits[name] if item.key not in bad]
        counts = Counter(item.label for item in items)
        if name == "train":
            _check_classes(listing, counts, skipped)
        if not items:
            raise RaytrainError(f"{listing.root}: not one {name} image is usable; add some")
        splits[name] = Split(
            num_images=len(items),
            class_counts=tuple(counts[label] for label in range(len(listing.classes))),
            shards=tuple(
                Shard(rows=result.rows, files=result.files)
                for task, result in results
                if task.split == name and result.rows
            ),
        )
    return Manifest(
        raytrain_version=version("raytrain"),
        source=str(listing.root),
        plan=plan.fingerprint,
        options={**plan.options.recorded(), "max_bad": plan.options.max_bad},
        classes=listing.classes,
        sizes=tuple(sort_sizes(plan.options.sizes)),
        jpeg_quality=JpegQuality(resized=plan.options.quality, same_size=SAME_SIZE_QUALITY),
        block_rows=plan.options.block_rows,
        splits=splits,
        skipped=skipped,
    )


def _check_classes(listing: Listing, counts: Counter[int], skipped: Sequence[Skipped]) -> None:
    for label, name in enumerate(listing.classes):
        if counts[label]:
            continue
        keys = {item.key for item in listing.splits["train"] if item.label == label}
        first = next(item for item in skipped if item.key in keys)
        raise RaytrainError(
            f"class {name} has no usable training image ({first.key}: {first.reason}); give it "
            "one or remove its folder, remove the unfinished output folder, and prepare again"
        )


@contextmanager
def _progress(total: int, console: Console) -> Iterator[Callable[[int], None]]:
    """Show progress: a bar on a terminal, a line now and then elsewhere.

    Yields a function to call with each number of images done.
    """
    if not console.is_terminal:
        yield _ProgressLines(total, console).advance
        return
    columns = (
        TextColumn("preparing"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("images"),
        _SpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("preparing", total=total)
        yield lambda images: bar.advance(task, images)


class _SpeedColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:.0f} images/s")


class _ProgressLines:
    def __init__(self, total: int, console: Console) -> None:
        self._total = total
        self._console = console
        self._done = 0
        self._start = self._last = time.monotonic()

    def advance(self, images: int) -> None:
        self._done += images
        now = time.monotonic()
        if now - self._last < SECONDS_BETWEEN_LINES:
            return
        self._last = now
        speed = self._done / (now - self._start)
        self._console.print(
            f"prepared {self._done}/{self._total} images, {speed:.0f} images/s, "
            f"{(self._total - self._done) / speed:.0f} s to go"
        )
