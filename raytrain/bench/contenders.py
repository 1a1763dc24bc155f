"""Ways from a JPEG file to a random crop, and to its pixels alone: ours and those of others."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from raytrain.bench.measure import Pass
from raytrain.data.augment import CropRule, random_windows
from raytrain.data.decode import Decoder
from raytrain.data.shards import ShardSet, Size

BATCH = 64
CROPS = CropRule((0.08, 1.0), (3 / 4, 4 / 3), flip=True)  # torchvision's RandomResizedCrop


@dataclass(frozen=True, eq=False)
class StoredImages:
    """Some images of a ShardSet in one size.

    Attributes:
        jpegs: n files.
        widths: pixels, int64, shape (n,).
        heights: likewise.
    """

    jpegs: list[bytes]
    widths: NDArray[np.int64]
    heights: NDArray[np.int64]

    @classmethod
    def read(cls, shards: ShardSet, size: Size, most: int) -> StoredImages:
        """The first images of the training split, at most ``most``."""
        rows: list[dict[str, Any]] = []
        for block in shards.blocks("train"):
            if len(rows) >= most:
                break
            rows += shards.read_block("train", size, block).to_pylist()
        rows = rows[:most]
        sides = (np.array([row[side] for row in rows]) for side in ("width", "height"))
        return cls([row["image"] for row in rows], *sides)

    def as_folder(self, folder: Path) -> Path:
        """Write the images as files of one class, as torchvision's ImageFolder has them."""
        (folder / "all").mkdir(parents=True)
        for i, jpeg in enumerate(self.jpegs):
            (folder / "all" / f"{i:06d}.jpg").write_bytes(jpeg)
        return folder


def crops_by(decoder: Decoder, images: StoredImages, image_px: int) -> Pass:
    """One of our decoders, with other windows in each pass."""
    epochs = count()

    def one_pass() -> int:
        epoch = next(epochs)
        for first in range(0, len(images.jpegs), BATCH):
            jpegs = images.jpegs[first : first + BATCH]
            rows = np.arange(first, first + len(jpegs))
            windows = random_windows(
                CROPS, 0, epoch, rows, (images.widths[rows], images.heights[rows])
            )
            decoder.decode(jpegs, windows, image_px)
        return len(images.jpegs)

    return one_pass


def crops_by_torchvision(folder: Path, image_px: int) -> Pass:
    """What torchvision's training reference does, up to the uint8 tensor."""
    to_crop = transforms.Compose(
        [
            transforms.RandomResizedCrop(image_px),
            transforms.RandomHorizontalFlip(),
            transforms.PILToTensor(),
        ]
    )
    loader = DataLoader(ImageFolder(str(folder), to_crop), BATCH, shuffle=True)
    return lambda: sum(len(labels) for _, labels in loader)


def crops_by_ffcv(folder: Path, image_px: int, beton: Path) -> Pass:
    """FFCV with JPEG files in its own format, written to ``beton``; it encodes them once more."""
    ffcv = {
        part: import_module(f"ffcv.{part}")
        for part in ("fields", "fields.rgb_image", "loader", "transforms", "writer")
    }
    if not beton.exists():
        image = ffcv["fields"].RGBImageField(write_mode="jpg", jpeg_quality=92)
        fields = {"image": image, "label": ffcv["fields"].IntField()}
        writer = ffcv["writer"].DatasetWriter(str(beton), fields, num_workers=1)
        writer.from_indexed_dataset(ImageFolder(str(folder)))
    to_crop = [
        ffcv["fields.rgb_image"].RandomResizedCropRGBImageDecoder((image_px, image_px)),
        ffcv["transforms"].RandomHorizontalFlip(),
        ffcv["transforms"].ToTensor(),
    ]
    loader = ffcv["loader"].Loader(
        str(beton),
        batch_size=BATCH,
        num_workers=1,
        os_cache=True,
        order=ffcv["loader"].OrderOption.RANDOM,
        drop_last=False,
        pipelines={"image": to_crop, "label": None},
    )
    return lambda: sum(len(batch[0]) for batch in loader)


def ffcv_installed() -> bool:
    """Whether FFCV is there; importing it compiles, which takes a while."""
    return find_spec("ffcv") is not None


def jpeg_libraries() -> dict[str, Callable[[bytes], object]]:
    """Name -> function that decodes a JPEG file to RGB pixels."""
    return {
        "simplejpeg": partial(simplejpeg.decode_jpeg, colorspace="RGB"),
        "OpenCV": lambda jpeg: cv2.imdecode(
            np.frombuffer(jpeg, dtype=np.uint8), cv2.IMREAD_COLOR_RGB
        ),
        "Pillow": lambda jpeg: Image.open(io.BytesIO(jpeg)).convert("RGB"),
    }


def pixels_by(decode: Callable[[bytes], object], images: StoredImages) -> Pass:
    """Decoding whole images and nothing else."""

    def one_pass() -> int:
        for jpeg in images.jpegs:
            decode(jpeg)
        return len(images.jpegs)

    return one_pass
