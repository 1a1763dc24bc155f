"""The default job: real handwritten digits from image files to a trained model and its picture."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
from rich.console import Console

from raytrain.api import fit
from raytrain.errors import RaytrainError
from raytrain.orchestrate.prepare import PrepareOptions, prepare
from raytrain.run.report import report
from raytrain.session import tell


def write_digits(folder: str | Path, image_px: int = 32) -> None:
    """Write scikit-learn's digits as PNG files, ``folder/<digit>/<number>.png``.

    1,797 images of 8x8 pixels (Alpaydin and Kaynak 1998, UCI's Optical Recognition of Handwritten
    Digits), enlarged. Files that are there already stay.

    Args:
        folder: made where it is missing.
        image_px: side of the images written.

    Raises:
        RaytrainError: scikit-learn isn't installed.
    """
    try:
        from sklearn.datasets import load_digits  # noqa: PLC0415 (an extra)
    except ImportError as error:
        raise RaytrainError("the demo needs scikit-learn: pip install 'raytrain[demo]'") from error
    digits = load_digits()
    for number, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        path = Path(folder) / str(label) / f"{number:04d}.png"
        if path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        grey = np.rint(image * (255 / 16)).astype(np.uint8)
        large = cv2.resize(grey, (image_px, image_px), interpolation=cv2.INTER_CUBIC)
        cv2.imwrite(str(path), large)


def run_demo(folder: Path, workers: int) -> int:
    """Digits as image files -> ShardSet -> training on Ray -> report, told step by step.

    Args:
        folder: where everything goes; what is there already is not done again.
        workers: training workers.

    Returns:
        The exit status of the training.
    """
    images, data, run_dir = folder / "images", folder / "data", folder / "run"
    print(f"1. handwritten digits as image files: {images}")
    write_digits(images)
    print(f"2. raytrain prepare {images} {data} --sizes 16,original --val-fraction 0.2")
    prepare(images, data, PrepareOptions(sizes=(16, None), val_fraction=0.2))
    print(f"3. raytrain train digits --data {data} --workers {workers} --run-dir {run_dir}")
    result = fit("digits", data, workers=workers, run_dir=run_dir)
    print(tell(result))
    print(f"4. raytrain report {run_dir}")
    Console().print(report([run_dir]))
    print(_NEXT.format(picture=run_dir / "convergence.png", run_dir=run_dir))
    return result.exit_status


_NEXT = """
picture  {picture}
files    {run_dir}

your own folder of images, one folder a class:
  raytrain prepare PHOTOS PHOTOS.set --val-fraction 0.1 --sizes 64,original
  raytrain train small-images --data PHOTOS.set

ImageNet (train/<wnid>/*.JPEG and val/<wnid>/*.JPEG), on a machine or cluster with GPUs:
  raytrain prepare IMAGENET IMAGENET.set --sizes 256,352
  raytrain train imagenet-resnet50 --data IMAGENET.set
"""
