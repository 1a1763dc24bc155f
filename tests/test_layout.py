"""Which images a source folder has: each layout, and each way in which it can be wrong."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from raytrain.data.layout import Item, LayoutOptions, Listing, list_images
from raytrain.errors import RaytrainError


def make_files(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    return root


def make_class(root: Path, name: str, count: int) -> None:
    make_files(root, *(f"{name}/{i}.jpg" for i in range(count)))


def keys(listing: Listing, split: str) -> set[str]:
    return {item.key for item in listing.splits[split]}


def error_of(root: Path, options: LayoutOptions) -> str:
    with pytest.raises(RaytrainError) as caught:
        list_images(root, options)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("val", ["val", "validation", "test"])
def test_class_folders(tmp_path: Path, val: str) -> None:
    make_files(
        tmp_path,
        "train/b/1.jpg",
        "train/a/2.JPEG",
        "train/a/deeper/Ünï (1).PnG",
        "train/a/.DS_Store",
        "train/a/._2.JPEG",
        "train/a/notes.txt",
        "train/.hidden/x.jpg",
        f"{val}/b/3.webp",
    )
    listing = list_images(tmp_path, LayoutOptions())
    assert listing.classes == ("a", "b")
    assert set(listing.splits["train"]) == {
        Item("train/b/1.jpg", 1),
        Item("train/a/2.JPEG", 0),
        Item("train/a/deeper/Ünï (1).PnG", 0),
    }
    assert listing.splits["val"] == (Item(f"{val}/b/3.webp", 1),)


def test_training_images_are_mixed_and_validation_images_sorted(tmp_path: Path) -> None:
    for split in ("train", "val"):
        make_class(tmp_path / split, "a", 100)
        make_class(tmp_path / split, "b", 100)
    listing = list_images(tmp_path, LayoutOptions(seed=1))
    first_half = Counter(item.label for item in listing.splits["train"][:100])
    assert 30 < first_half[0] < 70
    assert list(listing.splits["val"]) == sorted(listing.splits["val"])
    assert list_images(tmp_path, LayoutOptions(seed=1)) == listing
    assert list_images(tmp_path, LayoutOptions(seed=2)).splits["train"] != listing.splits["train"]


@pytest.mark.parametrize("train", ["", "train"])
def test_val_fraction_holds_out_a_share_of_each_class(tmp_path: Path, train: str) -> None:
    make_class(tmp_path / train, "many", 100)
    make_class(tmp_path / train, "few", 4)
    make_class(tmp_path / train, "one", 1)
    listing = list_images(tmp_path, LayoutOptions(val_fraction=0.3))
    assert listing.classes == ("few", "many", "one")
    assert Counter(item.label for item in listing.splits["val"]) == {0: 1, 1: 30}
    assert len(listing.splits["train"]) == 105 - 31
    assert not keys(listing, "train") & keys(listing, "val")
    everything = list_images(tmp_path, LayoutOptions(val_fraction=0.99))
    assert {item.label for item in everything.splits["train"]} == {0, 1, 2}


def test_adding_an_image_moves_no_other_between_the_splits(tmp_path: Path) -> None:
    make_class(tmp_path, "a", 40)
    make_class(tmp_path, "b", 40)
    before = list_images(tmp_path, LayoutOptions(val_fraction=0.25))
    make_files(tmp_path, "b/new.jpg")
    after = list_images(tmp_path, LayoutOptions(val_fraction=0.25))
    assert len(keys(before, "val") - keys(after, "val")) <= 1


@pytest.mark.parametrize(
    "text",
    [
        "2.JPEG b\n1.JPEG a\n",
        "1.JPEG\ta\t0\t0\t63\t63\n2.JPEG\tb\t1\t1\t2\t2\n",
        "ImageId,PredictionString\n1,a 85 1 499 272\n2,b 1 2 3 4 b 5 6 7 8 \n",
        '\ufefffile,class\r\nval/1.JPEG,"a"\r\n\r\n"val/2.JPEG", b\r\n',
    ],
    ids=["spaces", "tiny-imagenet", "kaggle", "csv with header, BOM and folders"],
)
def test_flat_validation_folder(tmp_path: Path, text: str) -> None:
    make_files(tmp_path, "train/a/x.jpg", "train/b/x.jpg", "val/1.JPEG", "val/2.JPEG")
    labels = tmp_path / "labels.txt"
    labels.write_text(text)
    listing = list_images(tmp_path, LayoutOptions(val_labels=labels))
    assert listing.splits["val"] == (Item("val/1.JPEG", 0), Item("val/2.JPEG", 1))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("1.JPEG a\n", "no class for val/2.JPEG (1 such files)"),
        ("1.JPEG a\n2.JPEG b\n1.JPEG a\n", "line 3: 1.JPEG already has a class from line 1"),
        ("1.JPEG a\n2.JPEG b\n3.JPEG b\n", "line 3: 3.JPEG is not in"),
        ("1.JPEG a\n2.JPEG c\n", "line 2: 'c' is a validation class that training lacks"),
        ("1.JPEG a\n2.JPEG\n", "line 2: give a file name and a class"),
        ("490\n361\n", "line 1: give a file name and a class"),
    ],
)
def test_wrong_label_files(tmp_path: Path, text: str, complaint: str) -> None:
    make_files(tmp_path, "train/a/x.jpg", "train/b/x.jpg", "val/1.JPEG", "val/2.JPEG")
    labels = tmp_path / "labels.txt"
    labels.write_text(text)
    message = error_of(tmp_path, LayoutOptions(val_labels=labels))
    assert str(labels) in message
    assert complaint in message


def test_label_file_that_is_no_text(tmp_path: Path) -> None:
    make_files(tmp_path, "train/a/x.jpg", "train/b/x.jpg", "val/1.JPEG")
    labels = tmp_path / "labels.bin"
    labels.write_bytes(b"\xff\xfe\x00")
    assert "not a readable text file" in error_of(tmp_path, LayoutOptions(val_labels=labels))
    missing = tmp_path / "missing.txt"
    assert str(missing) in error_of(tmp_path, LayoutOptions(val_labels=missing))


def test_label_file_and_two_files_of_one_name(tmp_path: Path) -> None:
    make_files(tmp_path, "train/a/x.jpg", "train/b/x.jpg", "val/p/1.JPEG", "val/q/1.JPEG")
    labels = make_files(tmp_path, "labels.txt") / "labels.txt"
    message = error_of(tmp_path, LayoutOptions(val_labels=labels))
    assert "two files are called 1.JPEG" in message


HOLD_OUT = LayoutOptions(val_fraction=0.5)


@pytest.mark.parametrize(
    ("files", "options", "complaint"),
    [
        ([], LayoutOptions(), "no such folder"),
        (["notes.txt"], LayoutOptions(), "no images here; looked for train/<class>/"),
        (["train/a/1.txt", "train/b/2.txt"], LayoutOptions(), "no images here; looked for"),
        (["a/1.jpg", "b/1.jpg"], LayoutOptions(), "hold some out with --val-fraction 0.1"),
        (["train/a/1.jpg", "train/b/1.jpg"], LayoutOptions(), "--val-fraction 0.1"),
        (["a/1.jpg", "b/1.jpg"], HOLD_OUT, "leaves no validation image"),
        (["a/1.jpg", "a/2.jpg"], HOLD_OUT, "only one class folder (a)"),
        (["a/1.jpg", "b/1.txt"], HOLD_OUT, "b: a class folder with no image files"),
        (["a/1.jpg", "b/1.jpg", "2.jpg"], HOLD_OUT, "2.jpg: lies outside any class folder"),
        (
            ["train/a/1.jpg", "train/b/1.jpg", "val/a/2.jpg"],
            HOLD_OUT,
            "there is a validation folder, so --val-fraction has no use",
        ),
        (
            ["train/a/1.jpg", "train/b/1.jpg", "val/c/2.jpg"],
            LayoutOptions(),
            "val/c: a validation class that training lacks",
        ),
        (
            ["train/a/1.jpg", "train/b/1.jpg", "val/a/1.jpg", "val/b/x.txt"],
            LayoutOptions(),
            "val/b: a class folder with no image files",
        ),
        (
            ["train/a/1.jpg", "train/b/1.jpg", "val/1.jpg"],
            LayoutOptions(),
            "give their classes with --val-labels FILE",
        ),
        (
            ["train/a/1.jpg", "train/b/1.jpg"],
            LayoutOptions(val_labels=Path("labels.txt")),
            "--val-labels needs a val folder",
        ),
    ],
)
def test_wrong_folders(
    tmp_path: Path, files: list[str], options: LayoutOptions, complaint: str
) -> None:
    source = make_files(tmp_path / "source", *files)
    assert complaint in error_of(source, options)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1])
def test_val_fraction_must_be_a_share(fraction: float) -> None:
    with pytest.raises(RaytrainError, match="above 0 and below 1"):
        LayoutOptions(val_fraction=fraction)


def test_one_source_of_validation_images() -> None:
    with pytest.raises(RaytrainError, match="exclude each other"):
        LayoutOptions(val_fraction=0.1, val_labels=Path("labels.txt"))


def test_linked_folders_are_followed_once(tmp_path: Path) -> None:
    store = make_files(tmp_path / "store", "1.jpg", "2.jpg")
    source = make_files(tmp_path / "source", "b/3.jpg", "b/4.jpg")
    (source / "a").symlink_to(store)
    (store / "loop").symlink_to(store)
    listing = list_images(source, HOLD_OUT)
    assert keys(listing, "train") | keys(listing, "val") == {
        "a/1.jpg",
        "a/2.jpg",
        "b/3.jpg",
        "b/4.jpg",
    }
    (source / "b" / "5.jpg").symlink_to(tmp_path / "nothing.jpg")
    assert "5.jpg: a link to a missing file" in error_of(source, HOLD_OUT)


def test_file_name_that_is_not_unicode(tmp_path: Path) -> None:
    make_files(tmp_path, "a/1.jpg", "b/1.jpg")
    Path(os.fsdecode(os.fsencode(tmp_path / "a") + b"/\xff.jpg")).write_bytes(b"")
    assert r"\udcff.jpg': a file name that isn't UTF-8" in error_of(tmp_path, HOLD_OUT)
