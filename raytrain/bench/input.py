"""``raytrain bench input``: what the input pipeline delivers on this machine, beside others."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Group
from rich.table import Table

from raytrain.bench.contenders import (
    StoredImages,
    crops_by,
    crops_by_ffcv,
    crops_by_torchvision,
    ffcv_installed,
    jpeg_libraries,
    pixels_by,
)
from raytrain.bench.measure import (
    Pass,
    Spread,
    images_per_core_second,
    ratios,
    this_machine,
    versions_of,
)
from raytrain.bench.stream import StreamSpeed, measure_stream
from raytrain.data.decode_cpu import CpuDecoder
from raytrain.data.decode_dali import DaliDecoder, dali_installed
from raytrain.data.layout import IMAGE_SUFFIXES
from raytrain.data.shards import MANIFEST, ShardSet, Size, size_name
from raytrain.errors import RaytrainError
from raytrain.orchestrate.prepare import PrepareOptions, prepare
from raytrain.run.format import rate

IMAGE_PX = (224, 128, 96)
OURS = "raytrain cpu"
FLOOR = "decode only: simplejpeg"
_PACKAGES = (
    "raytrain",
    "simplejpeg",
    "opencv-python-headless",
    "pillow",
    "torchvision",
    "ray",
    "nvidia-dali-cuda120",
    "nvidia-dali-cuda130",
    "ffcv",
)


@dataclass(frozen=True)
class BenchOptions:
    """What to measure.

    Attributes:
        sizes: short sides to prepare, where a folder of images is given.
        images: most images to measure with.
        repeats: turns of each rival.
        seconds: CPU seconds that a turn lasts at least.
        stream: measure the stream through Ray Data too.
    """

    sizes: tuple[Size, ...] = (160, 256, 352, None)
    images: int = 512
    repeats: int = 5
    seconds: float = 0.5
    stream: bool = False


@dataclass(frozen=True)
class Case:
    """One way from files to pixels.

    Attributes:
        what: who does it.
        size: name of the stored size that is decoded.
        image_px: side of the crops; None where whole images are decoded and nothing else.
    """

    what: str
    size: str
    image_px: int | None


@dataclass(frozen=True)
class Row:
    """Images a second that a case makes of one core."""

    case: Case
    images_per_s: Spread


@dataclass(frozen=True)
class Ratio:
    """How many times as fast as a rival ours is, at one image size, turn by turn.

    Attributes:
        image_px: side of the crops.
        size: the stored size that ours decodes, which is the one that training reads.
        rival: what it is compared with.
        times: ours over the rival's.
    """

    image_px: int
    size: str
    rival: Case
    times: Spread


@dataclass(frozen=True)
class InputReport:
    """What was measured, on what."""

    machine: dict[str, str | int | float]
    versions: dict[str, str]
    images: int
    rows: tuple[Row, ...]
    ratios: tuple[Ratio, ...]
    stream: StreamSpeed | None

    def as_json(self) -> str:
        """All numbers; image rates are in images a second."""
        return json.dumps(asdict(self), indent=1)


def bench_input(where: str, options: BenchOptions) -> InputReport:
    """Measure with the images of a ShardSet or of a folder, which is prepared for the purpose.

    Args:
        where: a ShardSet (folder or ``s3://`` address), or a folder with images at any depth.
        options: how much to measure.

    Raises:
        RaytrainError: there are no images.
    """
    with TemporaryDirectory(prefix="raytrain-bench-") as scratch, _one_torch_thread():
        shards = _open(where, options, Path(scratch))
        stored = {size: StoredImages.read(shards, size, options.images) for size in shards.sizes}
        cases = _cases(shards, stored, Path(scratch, "files"))
        rates = images_per_core_second(cases, options.repeats, options.seconds)
        stream = measure_stream(shards, options.repeats) if options.stream else None
    return InputReport(
        machine=this_machine(),
        versions=versions_of(_PACKAGES),
        images=len(next(iter(stored.values())).jpegs),
        rows=tuple(Row(case, Spread.of(values)) for case, values in rates.items()),
        ratios=tuple(_ratios(shards, rates)),
        stream=stream,
    )


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """More would spend CPU time waiting for each other over a batch of small images."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _open(where: str, options: BenchOptions, scratch: Path) -> ShardSet:
    folder = Path(where)
    if "://" in where or (folder / MANIFEST).exists() or not folder.is_dir():
        return ShardSet.open(where)
    files = sorted(p for p in folder.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES)
    if len(files) < 2:
        raise RaytrainError(f"{folder}: no ShardSet and no images; give one or the other")
    links = scratch / "links"
    for i, file in enumerate(files[:: -(-len(files) // options.images)]):
        _link(file, links / "train" / f"class{i % 2}" / f"{i:06d}{file.suffix}")
    for label in range(2):  # prepare wants a validation split; nothing here reads it
        _link(files[0], links / "val" / f"class{label}" / f"0{files[0].suffix}")
    return prepare(links, scratch / "set", PrepareOptions(sizes=options.sizes, max_bad=1.0))


def _link(file: Path, link: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(file.absolute())


def _cases(shards: ShardSet, stored: dict[Size, StoredImages], files: Path) -> dict[Case, Pass]:
    """Ours from every size that is large enough; rivals from the size that training reads too, and
    from the original files, which is what they are used with."""
    cases: dict[Case, Pass] = {}
    folders = {size: images.as_folder(files / size_name(size)) for size, images in stored.items()}
    for image_px in IMAGE_PX:
        read = shards.size_for(image_px)
        for size in shards.sizes:
            if size in (read, None) or size >= image_px:
                case = Case(OURS, size_name(size), image_px)
                cases[case] = crops_by(CpuDecoder(), stored[size], image_px)
            if size in (read, None):
                for what, work in _rivals(stored[size], folders[size], image_px).items():
                    cases[Case(what, size_name(size), image_px)] = work
    for size in shards.sizes:
        for library, decode in jpeg_libraries().items():
            case = Case(f"decode only: {library}", size_name(size), None)
            cases[case] = pixels_by(decode, stored[size])
    return cases


def _rivals(images: StoredImages, folder: Path, image_px: int) -> dict[str, Pass]:
    rivals = {"torchvision": crops_by_torchvision(folder, image_px)}
    if dali_installed():
        rivals["DALI cpu"] = crops_by(DaliDecoder(), images, image_px)
    if ffcv_installed():
        beton = folder.with_suffix(".beton")
        rivals["FFCV"] = crops_by_ffcv(folder, image_px, beton)
    return rivals


def _ratios(shards: ShardSet, rates: dict[Case, list[float]]) -> Iterator[Ratio]:
    for image_px in IMAGE_PX:
        size = size_name(shards.size_for(image_px))
        ours = rates[Case(OURS, size, image_px)]
        for case, values in rates.items():
            is_floor = case == Case(FLOOR, size, None)
            if is_floor or (case.image_px == image_px and case.what != OURS):
                yield Ratio(image_px, size, case, ratios(ours, values))


def tables(report: InputReport) -> Group:
    """The report for a person."""
    speeds = Table(title=f"images a second of one core ({report.machine['cpu']})")
    for heading in ("image", "what", "from", "median", "least", "most"):
        speeds.add_column(heading, justify="left" if heading == "what" else "right")
    for row in sorted(report.rows, key=lambda r: (-(r.case.image_px or 0), r.case.what)):
        side = f"{row.case.image_px} px" if row.case.image_px else "whole"
        speeds.add_row(side, row.case.what, row.case.size, *_cells(row.images_per_s, rate))
    times = Table(title=f"{OURS} beside others: how many times as fast")
    for heading in ("image", "from", "than", "from", "median", "least", "most"):
        times.add_column(heading, justify="left" if heading == "than" else "right")
    for ratio in report.ratios:
        rival = ratio.rival
        cells = _cells(ratio.times, "{:.2f}".format)
        times.add_row(f"{ratio.image_px} px", ratio.size, rival.what, rival.size, *cells)
    return Group(speeds, times, *([report.stream.table()] if report.stream else []))


def _cells(spread: Spread, show: Callable[[float], str]) -> list[str]:
    return [show(value) for value in (spread.median, spread.low, spread.high)]
