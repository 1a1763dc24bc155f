"""`raytrain data check`, `show` and `diff`: what they find, name and draw."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from raytrain.cli import app
from raytrain.data.check import Finding, check_set
from raytrain.data.compare import compare_sets
from raytrain.data.layout import Item
from raytrain.data.reader import TrainingImages, ValidationImages, View
from raytrain.data.shards import Shard, ShardSet
from raytrain.data.sheet import training_sheet, validation_sheet
from raytrain.data.write import ShardTask, write_shard
from raytrain.errors import RaytrainError
from raytrain.recipe.load import recipe_from_dict
from raytrain.recipe.plan import Plan
from tests.sets import flip_bit, write_manifest, write_set

RECIPE = recipe_from_dict(
    {
        "model": {"name": "not.used:here"},
        "phases": [
            {"epochs": 2, "image_px": 14, "batch": 64},
            {"epochs": 1, "image_px": 20, "batch": 331, "crop_area": [0.5, 1.0]},
        ],
        "schedule": {"lr": 0.1},
    }
)


@pytest.fixture
def source(drawn_images: Path, tmp_path: Path) -> Path:
    """A copy of the drawn images that a test may change."""
    copy = tmp_path / "source"
    shutil.copytree(drawn_images, copy)
    return copy


@pytest.fixture
def shards(drawn_images: Path, tmp_path: Path) -> ShardSet:
    return write_set(drawn_images, tmp_path / "set")


def texts(findings: list[Finding]) -> list[str]:
    assert all("\n" not in finding.text for finding in findings)
    return [finding.text for finding in findings if finding.is_wrong]


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["data", *map(str, arguments)])
    return result.exit_code, result.stdout


def test_a_whole_set_has_nothing_wrong(shards: ShardSet) -> None:
    done: list[int] = []
    assert check_set(shards, threads=2, advance=done.append) == []
    assert sum(done) == 331 + 103
    status, shown = run("check", shards.uri)
    assert status == 0
    assert "0 wrong, 0 to note" in shown
    assert "circle: 83" in shown


def test_files_that_have_changed_are_named(shards: ShardSet) -> None:
    folder = Path(shards.uri)
    flip_bit(folder / "train/16/00001.parquet", 3)  # in the first four bytes nothing is read
    flip_bit(folder / "train/16/00002.parquet", 400)
    (folder / "val/original/00000.parquet").unlink()
    found = texts(check_set(shards))
    assert found == [
        f"{folder}/train/16/00001.parquet: its SHA-256 isn't the manifest's; it has changed",
        f"{folder}/train/16/00002.parquet: its SHA-256 isn't the manifest's; it has changed",
        f"{folder}/train/16/00002.parquet: block 0 is damaged (could not verify page integrity, "
        "CRC checksum verification failed for page_ordinal 0)",
        f"{folder}/val/original/00000.parquet: missing, though the manifest names it",
    ]
    status, shown = run("check", shards.uri)
    assert status == 1
    assert all(f"wrong: {text}\n" in shown for text in found)


def test_images_in_both_splits_under_two_classes_and_twice(source: Path, tmp_path: Path) -> None:
    shutil.copy(source / "train/circle/000.png", source / "val/circle/leak.png")
    shutil.copy(source / "train/cross/001.png", source / "train/square/torn.png")
    picture = Image.open(source / "train/stripes/003.png")
    picture.save(source / "train/stripes/plain.jpg")
    picture.save(source / "train/stripes/with_comment.jpg", comment=b"another file")
    findings = check_set(write_set(source, tmp_path / "set"))
    assert sorted(texts(findings)) == [
        "the same image in train and val, equal files: train train/circle/000.png, "
        "val val/circle/leak.png",
        "the same image under two classes, equal files: "
        "train train/cross/001.png (cross), train train/square/torn.png (square)",
    ]
    assert [finding.text for finding in findings if not finding.is_wrong] == [
        "the same image twice, equal pixels: train train/stripes/plain.jpg, "
        "train train/stripes/with_comment.jpg"
    ]


def test_labels_are_held_against_the_classes_and_the_folders(shards: ShardSet) -> None:
    classes = tuple(reversed(shards.classes))
    write_manifest(Path(shards.uri), shards.manifest.model_copy(update={"classes": classes}))
    found = texts(check_set(ShardSet.open(shards.uri)))
    assert len(found) == 2 * 4
    assert (
        "val: 26 images labelled stripes come from the class folder circle, such as "
        "val/circle/000.png" in found
    )
    train = shards.manifest.splits["train"]
    counts = (train.class_counts[0] - 1, train.class_counts[1] + 1, *train.class_counts[2:])
    wrong = train.model_copy(update={"class_counts": counts})
    splits = {**shards.manifest.splits, "train": wrong}
    write_manifest(Path(shards.uri), shards.manifest.model_copy(update={"splits": splits}))
    assert texts(check_set(ShardSet.open(shards.uri))) == [
        "train: class circle has 83 images, the manifest says 82",
        "train: class cross has 83 images, the manifest says 84",
    ]


def test_sizes_must_hold_the_same_rows(shards: ShardSet, drawn_images: Path) -> None:
    """Put the rows of a shard in another order in one size, with a checksum that fits."""
    old = shards.manifest.splits["val"].shards[-1]
    start = shards.num_images("val") - old.rows
    names = sorted(p.relative_to(drawn_images).as_posix() for p in drawn_images.rglob("val/*/*"))
    items = [Item(key, shards.classes.index(key.split("/")[1])) for key in names[start:]]
    swapped = (items[1], items[0], *items[2:])
    task = ShardTask(str(drawn_images), shards.uri, "val", 9, swapped, (16,), 92, 16)
    new = Shard(rows=old.rows, files={**old.files, **write_shard(task).files})
    split = shards.manifest.splits["val"]
    changed = split.model_copy(update={"shards": (*split.shards[:-1], new)})
    splits = {**shards.manifest.splits, "val": changed}
    write_manifest(Path(shards.uri), shards.manifest.model_copy(update={"splits": splits}))
    found = texts(check_set(ShardSet.open(shards.uri)))
    assert len(found) == 1
    assert found[0].startswith(
        f"{shards.uri}/val/16/00009.parquet: 2 rows differ from the largest size, the first is "
        f"row 0: {items[1].key} with label"
    )


def test_the_sheet_shows_what_the_model_sees(shards: ShardSet, tmp_path: Path) -> None:
    plan = Plan(RECIPE, shards.num_images("train"))
    first = plan.phases[1].first_step
    seen = next(TrainingImages(shards, plan).read([first])).pixels
    sheet = training_sheet(shards, RECIPE, 1, 40)
    assert [image.shape for image in sheet.pixels] == [(20, 20, 3)] * 40
    known = {image.tobytes() for image in seen}
    assert all(image.tobytes() in known for image in sheet.pixels)
    assert set(sheet.names) <= set(shards.classes)
    sheet.draw(tmp_path / "new/sheet.png")
    picture = np.asarray(Image.open(tmp_path / "new/sheet.png"))
    enlarged = sheet.pixels[0].repeat(7, axis=0).repeat(7, axis=1)
    assert np.array_equal(picture[42:182, 8:148], enlarged)


def test_the_sheet_of_validation_images_spans_the_split(shards: ShardSet) -> None:
    sheet = validation_sheet(shards, RECIPE, 0, 8)
    assert [image.shape for image in sheet.pixels] == [(14, 14, 3)] * 8
    assert set(sheet.names) == set(shards.classes)
    seen = next(ValidationImages(shards, View(14, 0.875), 103, range(103)).read([0])).pixels
    assert np.array_equal(sheet.pixels[1], seen[103 // 8])
    with pytest.raises(RaytrainError, match="--phase 2: the recipe has phases 0 to 1"):
        validation_sheet(shards, RECIPE, 2, 8)


def test_the_sheet_from_the_command_line(shards: ShardSet, tmp_path: Path) -> None:
    out = tmp_path / "digits.png"
    options = ("--recipe", "digits", "--phase", 1, "--split", "val", "--out", out)
    status, shown = run("show", shards.uri, *options)
    assert status == 0
    assert f"picture: {out}" in shown
    assert Image.open(out).size[0] > 8 * 128


def add_class(source: Path) -> None:
    for split in ("train", "val"):
        (source / split / "dots").mkdir()
        Image.new("RGB", (33, 33), "red").save(source / split / "dots/a.png")


def change_some(source: Path) -> None:
    (source / "train/circle/000.png").unlink()
    (source / "train/cross/001.png").rename(source / "train/square/001.png")
    (source / "train/stripes/003.png").write_bytes((source / "train/stripes/007.png").read_bytes())


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            add_class,
            [
                "classes added (1): dots",
                "train: 331 -> 332 images",
                "val: 103 -> 104 images",
                "images added (2): train train/dots/a.png, val val/dots/a.png",
            ],
        ),
        (
            change_some,
            [
                "train: 331 -> 330 images",
                "train: images of classes (3): circle 83 -> 82, cross 83 -> 82, square 83 -> 84",
                "images added (1): train train/square/001.png",
                "images removed (2): train train/circle/000.png, train train/cross/001.png",
                "images stored otherwise (1): train train/stripes/003.png",
            ],
        ),
    ],
)
def test_what_changed_is_told(
    change: Callable[[Path], None], expected: list[str], source: Path, tmp_path: Path
) -> None:
    old = write_set(source, tmp_path / "old")
    change(source)
    new = write_set(source, tmp_path / "new")
    assert compare_sets(old, new, threads=2) == expected
    assert compare_sets(old, old) == []
    status, shown = run("diff", old.uri, new.uri)
    assert status == 0
    assert shown.splitlines() == expected


def test_changes_that_only_the_manifest_or_the_labels_show(
    drawn_images: Path, shards: ShardSet, tmp_path: Path
) -> None:
    other = write_set(drawn_images, tmp_path / "other", sizes=(24, None), block_rows=8)
    assert compare_sets(shards, other) == [
        "sizes: 16,original -> 24,original",
        "option block_rows: 16 -> 8",
    ]
    reordered = (*shards.classes[1:], shards.classes[0])
    swapped = ShardSet(shards.uri, shards.manifest.model_copy(update={"classes": reordered}))
    lines = compare_sets(shards, swapped)
    assert lines[0] == "classes: the same in another order, so labels mean something else"
    assert lines[-1].startswith("images relabelled (434): train train/circle/000.png circle -> ")
    assert lines[-1].endswith("and 424 more")
    with_other_shards = write_set(drawn_images, tmp_path / "third", shard_images=(80,))
    assert compare_sets(shards, with_other_shards) == [
        "the same images in another order or other blocks"
    ]
