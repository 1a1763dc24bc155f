"""Decoders: one contract for all, and pixels that match torchvision's antialiased crops."""

from __future__ import annotations

import io
import pickle
import shutil
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cv2
import numpy as np
import pytest
import simplejpeg
import torch
import torchvision.transforms.v2.functional as tv
from PIL import Image

from raytrain.data import decode_dali, decoders
from raytrain.data.augment import CropRule, Windows, random_windows
from raytrain.data.decode import DamagedImageError, Decoder, Pixels
from raytrain.data.decode_cpu import CpuDecoder
from raytrain.data.decode_dali import DaliDecoder, dali_installed
from raytrain.data.decoders import choose_decoder
from raytrain.data.reader import TrainingImages
from raytrain.data.shards import MANIFEST, ShardSet
from raytrain.data.synthetic import SyntheticDecoder
from raytrain.data.write import decode as decode_file
from raytrain.data.write import store
from raytrain.errors import RaytrainError
from raytrain.recipe.load import recipe_from_dict
from raytrain.recipe.plan import Plan
from raytrain.recipe.types import DecoderName

SAMPLE = Path(__file__).parents[2] / "shared" / "data" / "imagenet-sample.tar"
ALL: tuple[DecoderName, ...] = ("cpu", "dali_cpu", "dali_gpu", "synthetic")
READING: tuple[DecoderName, ...] = ("cpu", "dali_cpu", "dali_gpu")


@pytest.fixture
def decoder(request: pytest.FixtureRequest) -> Decoder:
    name = request.param
    if name.startswith("dali") and not dali_installed():
        pytest.skip("NVIDIA DALI isn't installed")
    if name == "dali_gpu" and not torch.cuda.is_available():
        pytest.skip("no GPU here")
    return choose_decoder(name, "cuda:0" if name == "dali_gpu" else "cpu")


def for_decoders(names: tuple[DecoderName, ...]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("decoder", names, indirect=True)


def draw(height: int, width: int) -> bytes:
    """A JPEG whose every place looks different: waves in red, ramps in green and blue."""
    y, x = np.mgrid[:height, :width]
    waves = 128 + 80 * np.sin(x / 9) * np.cos(y / 7)
    image = np.stack([waves, 255 * x / width, 255 * y / height], axis=2).astype(np.uint8)
    return bytes(simplejpeg.encode_jpeg(image, quality=95))


def make_windows(*boxes: tuple[int, int, int, int, bool]) -> Windows:
    top, left, height, width, flip = (np.array(column) for column in zip(*boxes, strict=True))
    return Windows(top, left, height, width, flip)


def torchvision_crop(jpeg: bytes, windows: Windows, i: int, px: int) -> Pixels:
    crop = tv.resized_crop(
        tv.pil_to_tensor(Image.open(io.BytesIO(jpeg)).convert("RGB")),
        int(windows.top[i]),
        int(windows.left[i]),
        int(windows.height[i]),
        int(windows.width[i]),
        [px, px],
        antialias=True,
    )
    if windows.flip[i]:
        crop = tv.horizontal_flip(crop)
    pixels: Pixels = crop.permute(1, 2, 0).numpy()
    return pixels


def mean_difference(a: Pixels, b: Pixels) -> float:
    return float(np.abs(a.astype(np.float64) - b).mean())


@for_decoders(ALL)
def test_result_is_uint8_squares_in_host_memory(decoder: Decoder) -> None:
    jpegs: list[bytes | memoryview] = [draw(40, 50), memoryview(draw(60, 30)), draw(33, 33)]
    windows = make_windows((0, 0, 40, 50, False), (9, 1, 20, 25, True), (5, 5, 1, 1, False))
    for px in (24, 7):
        pixels = decoder.decode(jpegs, windows, px)
        assert isinstance(pixels, np.ndarray)
        assert pixels.shape == (3, px, px, 3)
        assert pixels.dtype == np.uint8
        assert pixels.flags.c_contiguous
        assert pixels.flags.writeable


@for_decoders(ALL)
def test_result_depends_on_nothing_but_the_arguments(decoder: Decoder) -> None:
    """The same after pickling, from several threads, and in any batch."""
    jpegs = [draw(40 + i, 60) for i in range(70)]  # more than DALI takes at once
    windows = make_windows(*((i % 9, i % 7, 30, 40, i % 2 == 0) for i in range(70)))
    pixels = decoder.decode(jpegs, windows, 16)
    copy: Decoder = pickle.loads(pickle.dumps(decoder))
    with ThreadPoolExecutor(3) as pool:
        for other in pool.map(lambda _: copy.decode(jpegs, windows, 16), range(3)):
            np.testing.assert_array_equal(other, pixels)
    alone = decoder.decode(jpegs[-1:], make_windows((69 % 9, 69 % 7, 30, 40, False)), 16)
    np.testing.assert_array_equal(alone[0], pixels[69])


@for_decoders(READING)
@pytest.mark.parametrize("px", [32, 96])
def test_windows_and_flips_are_the_given_ones(decoder: Decoder, px: int) -> None:
    jpegs = [draw(120, 160)] * 7
    windows = make_windows(
        (0, 0, 120, 160, False),
        (0, 0, 120, 160, True),
        (20, 30, 90, 100, False),
        (20, 31, 90, 100, False),
        (21, 30, 90, 100, True),
        (60, 110, 50, 40, False),
        (88, 128, 32, 32, False),
    )
    for i, pixels in enumerate(decoder.decode(jpegs, windows, px)):
        expected = torchvision_crop(jpegs[i], windows, i, px)
        assert mean_difference(pixels, expected) < 0.6  # a window off by one pixel: 1.6 and more


@for_decoders(READING)
def test_grey_images_come_as_rgb(decoder: Decoder) -> None:
    grey = np.tile(np.arange(64, dtype=np.uint8)[:, None, None], (1, 64, 1))
    jpeg = bytes(simplejpeg.encode_jpeg(grey, colorspace="GRAY", quality=95))
    (pixels,) = decoder.decode([jpeg], make_windows((0, 0, 64, 64, False)), 64)
    assert mean_difference(pixels, np.repeat(grey, 3, axis=2)) < 1


@for_decoders(READING)
@pytest.mark.parametrize("damage", ["nothing", "garbage", "truncated"])
def test_damaged_image_is_named_and_does_no_harm_to_the_next(decoder: Decoder, damage: str) -> None:
    whole = draw(200, 200)
    bad = {"nothing": b"", "garbage": b"no image", "truncated": whole[: len(whole) // 2]}[damage]
    windows = make_windows(*[(0, 0, 200, 200, False)] * 70)
    with pytest.raises(DamagedImageError) as caught:
        decoder.decode([*[whole] * 67, bad, whole, whole], windows, 32)
    assert caught.value.position == 67
    assert decoder.decode([whole] * 70, windows, 32).shape == (70, 32, 32, 3)


@pytest.fixture(scope="module")
def sample() -> list[bytes]:
    """Every fourth real ImageNet file."""
    if not SAMPLE.exists():
        pytest.skip(f"{SAMPLE} is absent")
    with tarfile.open(SAMPLE) as tar:
        files = sorted((m for m in tar if m.isfile()), key=lambda m: m.name)[::4]
        return [opened.read() for m in files if (opened := tar.extractfile(m)) is not None]


@for_decoders(READING)
@pytest.mark.parametrize(("size", "px"), [(160, 96), (160, 128), (256, 224)])
def test_pixels_match_torchvision_on_imagenet(
    decoder: Decoder, sample: list[bytes], size: int, px: int
) -> None:
    """Tolerances in levels of 255, for the phases' image sizes and the stored sizes they read."""
    stored = [store(decode_file(data, size), size, 92) for data in sample]
    sides = (np.array([s.width for s in stored]), np.array([s.height for s in stored]))
    rule = CropRule((0.08, 1.0), (3 / 4, 4 / 3), flip=True)
    windows = random_windows(rule, 0, 0, np.arange(len(stored)), sides)
    jpegs = [s.jpeg for s in stored]
    ours = decoder.decode(jpegs, windows, px).astype(np.float64)
    theirs = np.stack([torchvision_crop(j, windows, i, px) for i, j in enumerate(jpegs)])
    difference = np.abs(ours - theirs).mean((1, 2, 3))
    assert difference.mean() < 1.0
    assert difference.max() < 5.0
    assert np.abs(ours.mean((1, 2)) - theirs.mean((1, 2))).max() < 1.0
    spread = ours.std((1, 2)).mean(0) / theirs.std((1, 2)).mean(0)
    np.testing.assert_allclose(spread, 1, atol=0.01)


def test_shrinking_without_antialiasing_would_be_found(sample: list[bytes]) -> None:
    """What the tolerances above are worth: plain bilinear resizing is beyond them."""
    difference = []
    for data in sample[:20]:
        image = simplejpeg.decode_jpeg(data)
        whole = make_windows((0, 0, *image.shape[:2], False))
        plain = np.asarray(cv2.resize(image, (96, 96), interpolation=cv2.INTER_LINEAR))
        difference.append(mean_difference(plain, torchvision_crop(data, whole, 0, 96)))
    assert np.mean(difference) > 3.0


def test_auto_is_the_cpu_unless_a_gpu_has_few_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (decoders, decode_dali):
        monkeypatch.setattr(module, "dali_installed", lambda: True)
    assert choose_decoder("auto", "cpu", 1) == CpuDecoder()
    assert choose_decoder("auto", "cuda:1", 12) == CpuDecoder()
    assert choose_decoder("auto", "cuda:1", 2) == DaliDecoder(1)
    monkeypatch.setattr(decoders, "dali_installed", lambda: False)
    assert choose_decoder("auto", "cuda:1", 2) == CpuDecoder()


def test_only_decoding_on_a_gpu_must_be_in_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_dali, "dali_installed", lambda: True)
    names = {name: choose_decoder(name, "cuda", 8) for name in ALL}
    assert {name: d.in_worker for name, d in names.items()} == {
        "cpu": False,
        "dali_cpu": False,
        "dali_gpu": True,
        "synthetic": False,
    }
    assert [d.name for d in names.values()] == list(ALL)


def test_what_cannot_be_had_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RaytrainError, match=r"^input\.decoder: dali_gpu needs a GPU.*choose"):
        choose_decoder("dali_gpu", "cpu")
    monkeypatch.setattr(decode_dali, "dali_installed", lambda: False)
    for name in ("dali_cpu", "dali_gpu"):
        with pytest.raises(RaytrainError, match=f"{name} needs NVIDIA DALI.*pip install"):
            choose_decoder(name, "cuda:0")


def make_plan(shards: ShardSet) -> Plan:
    recipe = {
        "model": {"name": "resnet18"},
        "phases": [{"epochs": 1, "image_px": 16, "batch": 64}],
        "schedule": {"lr": 0.1},
    }
    return Plan(recipe_from_dict(recipe), shards.num_images("train"))


def test_synthetic_images_need_no_shards(drawn_set: Path, tmp_path: Path) -> None:
    shutil.copy(drawn_set / MANIFEST, tmp_path)
    shards = ShardSet.open(tmp_path)
    plan = make_plan(shards)
    real = TrainingImages(shards, plan)
    with pytest.raises(RaytrainError, match="missing"):
        next(real.read([0]))
    made_up = TrainingImages(shards, plan, decoder=SyntheticDecoder())
    for s, batch in enumerate(made_up.read(range(plan.num_steps))):
        count = plan.step(s).count
        assert batch.pixels.shape == (count, 16, 16, 3)
        np.testing.assert_array_equal(batch.rows, real.rows(plan.step(s)))
        assert batch.labels.shape == (count,)
        assert 0 <= batch.labels.min() <= batch.labels.max() < len(shards.classes)


@for_decoders(("dali_cpu",))
def test_the_reader_uses_the_decoder_it_is_given(decoder: Decoder, drawn_set: Path) -> None:
    shards = ShardSet.open(drawn_set)
    plan = make_plan(shards)
    (a,) = TrainingImages(shards, plan).read([1])
    (b,) = TrainingImages(shards, plan, decoder=decoder).read([1])
    np.testing.assert_array_equal(a.labels, b.labels)
    assert 0 < mean_difference(a.pixels, b.pixels) < 5  # of other crops: 40
