"""Find the images of a folder and their classes. Files are only listed here, never opened.

Three layouts are known:

1. ``train/<class>/**`` and ``val/<class>/**`` (``val`` may be called ``validation`` or ``test``);
2. ``train/<class>/**`` and a flat ``val/*.JPEG`` with a label file, as ImageNet comes;
3. ``<class>/**`` or ``train/<class>/**`` alone, with a share of each class held out.
"""

from __future__ import annotations

import csv
import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from raytrain.errors import RaytrainError

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff"})
VAL_FOLDERS = ("val", "validation", "test")
LAYOUTS = "train/<class>/ and val/<class>/, or a folder of class folders with --val-fraction"


class Item(NamedTuple):
    """One image file: ``key`` is its path relative to the source folder in posix form."""

    key: str
    label: int


@dataclass(frozen=True)
class LayoutOptions:
    """How to read a source folder.

    Attributes:
        val_fraction: share of each class, above 0 and below 1, held out for validation.
        val_labels: text or CSV file of ``file name, class`` for a flat validation folder.
        seed: decides which images are held out and the order in which training images are
            written.
    """

    val_fraction: float | None = None
    val_labels: Path | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.val_fraction is not None and not 0 < self.val_fraction < 1:
            raise RaytrainError(
                f"--val-fraction {self.val_fraction}: give a share above 0 and below 1, such as 0.1"
            )
        if self.val_fraction is not None and self.val_labels is not None:
            raise RaytrainError(
                "--val-fraction and --val-labels exclude each other: validation images are "
                "either held out of training or labelled by a file; give one of the two"
            )


@dataclass(frozen=True)
class Listing:
    """The images of a source folder.

    Attributes:
        root: the source folder, to which every key is relative.
        classes: class names, sorted; an item's label is an index into them.
        splits: ``train`` in a seeded random order, so that each block of rows mixes classes;
            ``val`` sorted by key.
    """

    root: Path
    classes: tuple[str, ...]
    splits: dict[str, tuple[Item, ...]]


def list_images(src: Path, options: LayoutOptions) -> Listing:
    """List the images under `src`, whichever of the known layouts it has.

    Hidden files and folders are ignored, linked folders followed. A file counts as an image
    by its suffix here; whether it really is one shows when it is decoded.

    Raises:
        RaytrainError: the folder is missing, has no images or none for validation, or its
            classes don't add up.
    """
    if not src.is_dir():
        raise RaytrainError(f"{src}: no such folder; give a folder of images ({LAYOUTS})")
    try:
        return _list_images(src, options)
    except OSError as error:
        raise RaytrainError(
            f"{error.filename}: cannot be listed ({error.strerror}); fix its permissions or "
            "move it away"
        ) from None


def _list_images(src: Path, options: LayoutOptions) -> Listing:
    train_root, val_root = _find_roots(src)
    by_class = _scan_classes(src, train_root)
    classes = tuple(sorted(by_class))
    if len(classes) < 2:
        raise RaytrainError(
            f"{train_root}: only one class folder ({classes[0]}), so nothing to tell apart; "
            f"is it a level too high or low? looked for {LAYOUTS}"
        )
    label_of = {name: label for label, name in enumerate(classes)}
    train = [Item(key, label_of[name]) for name in classes for key in by_class[name]]
    if options.val_fraction is not None:
        if val_root is not None:
            raise RaytrainError(
                f"{val_root}: there is a validation folder, so --val-fraction has no use; "
                "leave it out or move the folder away"
            )
        train, val = _hold_out(train, options.val_fraction, options.seed)
    elif val_root is None:
        flag = "" if options.val_labels is None else "; --val-labels needs a val folder"
        raise RaytrainError(
            f"{src}: no validation images{flag}; add val/<class>/ beside train/ or hold "
            "some out with --val-fraction 0.1"
        )
    elif options.val_labels is not None:
        val = _read_flat_val(src, val_root, options.val_labels, label_of)
    else:
        val = _read_val_classes(src, val_root, label_of)
    train.sort(key=lambda item: _seeded_rank("order", options.seed, item.key))
    val.sort()
    return Listing(src, classes, {"train": tuple(train), "val": tuple(val)})


def _find_roots(src: Path) -> tuple[Path, Path | None]:
    """Return the folder of training classes and, where `src` has one, of validation images."""
    if not _subfolders(src / "train"):
        return src, None
    found = [src / name for name in VAL_FOLDERS if (src / name).is_dir()]
    return src / "train", found[0] if found else None


def _subfolders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def _scan_classes(src: Path, root: Path) -> dict[str, list[str]]:
    """Return class name -> sorted keys for a folder of class folders."""
    folders = _subfolders(root)
    by_class = {folder.name: sorted(_walk(src, folder)) for folder in folders}
    stray = [p for p in sorted(root.iterdir()) if p.is_file() and _looks_like_image(p.name)]
    if not any(by_class.values()) and not stray:
        raise RaytrainError(f"{root}: no images here; looked for {LAYOUTS}")
    if stray:
        raise RaytrainError(
            f"{stray[0]}: lies outside any class folder ({len(stray)} such files); move it "
            f"into {root}/<class>/"
        )
    for name, keys in by_class.items():
        if not keys:
            raise RaytrainError(
                f"{root / name}: a class folder with no image files; add images or remove it"
            )
    return by_class


def _walk(src: Path, folder: Path) -> Iterator[str]:
    """Yield the keys of the image files under `folder`, each real folder once."""
    seen: set[tuple[int, int]] = set()
    pending = [(str(folder), folder.relative_to(src).as_posix())]
    while pending:
        path, key = pending.pop()
        status = Path(path).stat()
        identity = (status.st_dev, status.st_ino)
        if identity in seen:
            continue
        seen.add(identity)
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    pending.append((entry.path, f"{key}/{entry.name}"))
                elif _looks_like_image(entry.name):
                    if entry.is_file():
                        yield _checked_key(f"{key}/{entry.name}")
                    elif entry.is_symlink():
                        raise RaytrainError(f"{entry.path}: a link to a missing file; remove it")


def _looks_like_image(name: str) -> bool:
    suffix = os.path.splitext(name)[1].lower()  # noqa: PTH122, a Path for each file is slow
    return suffix in IMAGE_SUFFIXES and not name.startswith(".")


def _checked_key(key: str) -> str:
    try:
        key.encode()
    except UnicodeEncodeError:
        raise RaytrainError(f"{key!a}: a file name that isn't UTF-8; rename it") from None
    return key


def _seeded_rank(purpose: str, seed: int, key: str) -> bytes:
    """Return a pseudo-random rank of `key`.

    It depends on nothing but its arguments, so adding an image leaves the order of the others.
    """
    return hashlib.blake2b(f"{purpose}:{seed}:{key}".encode(), digest_size=12).digest()


def _hold_out(items: list[Item], fraction: float, seed: int) -> tuple[list[Item], list[Item]]:
    """Split off `fraction` of each class, rounded half up, leaving at least one to train on."""
    by_label: dict[int, list[Item]] = {}
    for item in items:
        by_label.setdefault(item.label, []).append(item)
    train: list[Item] = []
    val: list[Item] = []
    for members in by_label.values():
        members.sort(key=lambda item: _seeded_rank("val", seed, item.key))
        count = min(int(len(members) * fraction + 0.5), len(members) - 1)
        val += members[:count]
        train += members[count:]
    if not val:
        largest = max(map(len, by_label.values()))
        raise RaytrainError(
            f"--val-fraction {fraction} of classes of at most {largest} images leaves no "
            "validation image; give a larger share or more images"
        )
    return train, val


def _read_val_classes(src: Path, root: Path, label_of: dict[str, int]) -> list[Item]:
    if not _subfolders(root) and any(_looks_like_image(p.name) for p in root.iterdir()):
        raise RaytrainError(
            f"{root}: images but no class folders; give their classes with --val-labels FILE "
            "(lines of file name, class)"
        )
    by_class = _scan_classes(src, root)
    for name in by_class:
        if name not in label_of:
            raise RaytrainError(
                f"{root / name}: a validation class that training lacks; add it to train/ or "
                "remove it"
            )
    return [Item(key, label_of[name]) for name, keys in by_class.items() for key in keys]


def _read_flat_val(src: Path, root: Path, labels: Path, label_of: dict[str, int]) -> list[Item]:
    """Give each image under `root` the class that the file `labels` names for it."""
    keys = sorted(_walk(src, root))
    key_of = _index_names(root, keys)
    line_of: dict[str, int] = {}
    items: list[Item] = []
    for number, name, class_name in _read_label_lines(labels, label_of):
        key = key_of.get(PurePosixPath(name).name)
        if number == 1 and key is None and class_name not in label_of:
            continue  # a header
        where = f"{labels}: line {number}"
        if key is None:
            raise RaytrainError(f"{where}: {name} is not in {root}; correct the line or remove it")
        if class_name not in label_of:
            raise RaytrainError(
                f"{where}: {class_name!r} is a validation class that training lacks; correct "
                "the line or add the class to train/"
            )
        if key in line_of:
            raise RaytrainError(
                f"{where}: {name} already has a class from line {line_of[key]}; remove one of "
                "the two lines"
            )
        line_of[key] = number
        items.append(Item(key, label_of[class_name]))
    without = [key for key in keys if key not in line_of]
    if without:
        raise RaytrainError(
            f"{labels}: no class for {without[0]} ({len(without)} such files); add a line of "
            "file name, class"
        )
    if not items:
        raise RaytrainError(f"{root}: no images here; put the validation images into it")
    return items


def _index_names(root: Path, keys: Iterable[str]) -> dict[str, str]:
    """Return file name -> key, each image also under its name without the suffix."""
    stems: dict[str, str] = {}
    names: dict[str, str] = {}
    for key in keys:
        name = PurePosixPath(key).name
        if name in names:
            raise RaytrainError(
                f"{root}: two files are called {name}, so a label file can't tell them apart; "
                "rename one or use class folders"
            )
        names[name] = stems[PurePosixPath(key).stem] = key
    return stems | names


def _read_label_lines(labels: Path, known: Iterable[str]) -> Iterator[tuple[int, str, str]]:
    """Yield (line number, file name, class) from lines split at commas, tabs or spaces."""
    try:
        lines = labels.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RaytrainError(f"{labels}: not a readable text file of labels ({error})") from None
    classes = set(known)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if "," in line:
            fields = next(csv.reader([line], skipinitialspace=True))
        else:
            fields = line.split("\t") if "\t" in line else line.rsplit(maxsplit=1)
        if len(fields) < 2 or not fields[0].strip() or not fields[1].strip():
            raise RaytrainError(f"{labels}: line {number}: give a file name and a class")
        class_name = fields[1].strip()
        if class_name not in classes:
            class_name = class_name.split()[0]  # Kaggle's form: the class, then its boxes
        yield number, fields[0].strip(), class_name
