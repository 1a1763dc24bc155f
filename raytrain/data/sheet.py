"""`raytrain data show`: a picture of what the model will really see in a phase."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from raytrain.data.decode import Pixels
from raytrain.data.reader import Batch, TrainingImages, ValidationImages, View
from raytrain.data.shards import ShardSet
from raytrain.errors import RaytrainError
from raytrain.recipe.plan import Plan
from raytrain.recipe.types import Recipe

_COLUMNS = 8
_CELL_PX = 128  # smaller images are enlarged by a whole number, so that a person sees something
_GAP_PX = 8
_TEXT_PX = 14


@dataclass(frozen=True)
class Sheet:
    """Images as the model gets them, before normalisation.

    Attributes:
        title: what they are.
        pixels: n images, each uint8, shape (height, width, 3), RGB.
        names: the class of each.
    """

    title: str
    pixels: list[Pixels]
    names: list[str]

    def draw(self, path: Path) -> None:
        """Write a PNG: the very pixels, with the class above each image.

        Raises:
            RaytrainError: it can't be written.
        """
        scale = -(-_CELL_PX // min(min(image.shape[:2]) for image in self.pixels))
        high, side = (max(image.shape[i] for image in self.pixels) * scale for i in range(2))
        across, down = side + _GAP_PX, high + _GAP_PX + _TEXT_PX
        rows = -(-len(self.pixels) // _COLUMNS)
        head = 2 * _TEXT_PX
        sheet = Image.new("RGB", (_COLUMNS * across + _GAP_PX, head + rows * down), "white")
        drawing, font = ImageDraw.Draw(sheet), ImageFont.load_default(_TEXT_PX - 2)
        drawing.text((_GAP_PX, _TEXT_PX // 3), self.title, "black", font)
        for i, (image, name) in enumerate(zip(self.pixels, self.names, strict=True)):
            left, top = _GAP_PX + i % _COLUMNS * across, head + i // _COLUMNS * down
            shown = name
            while drawing.textlength(shown, font) > side:
                shown = shown.removesuffix("…")[:-1] + "…"
            drawing.text((left, top), shown, "black", font)
            enlarged = image.repeat(scale, axis=0).repeat(scale, axis=1)
            sheet.paste(Image.fromarray(enlarged), (left, top + _TEXT_PX))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            sheet.save(path, "PNG")
        except OSError as error:
            raise RaytrainError(
                f"{path}: can't be written ({error.strerror}); choose another --out"
            ) from error


def training_sheet(shards: ShardSet, recipe: Recipe, phase: int, images: int) -> Sheet:
    """At most `images` of the first step of a phase, with their crops and flips.

    Raises:
        RaytrainError: there is no such phase, or the set can't be read.
    """
    plan = Plan(recipe, shards.num_images("train"))
    span = plan.phases[_checked(recipe, phase)]
    step = plan.step(span.first_step)
    workers = max(1, step.count // images)  # so many that the first one's share is enough
    batch = next(TrainingImages(shards, plan, 0, workers).read([step.index]))
    title = (
        f"train, phase {phase}, epoch {step.epoch}: {step.image_px} x {step.image_px} px, crops of "
        f"{step.crop_area[0]:g} to {step.crop_area[1]:g} of the area"
    )
    return _sheet(title, [batch], shards, images)


def validation_sheet(shards: ShardSet, recipe: Recipe, phase: int, images: int) -> Sheet:
    """Validation images from all over the split, as they are seen after an epoch of a phase.

    Raises:
        RaytrainError: there is no such phase, or the set can't be read.
    """
    chosen = recipe.phases[_checked(recipe, phase)]
    image_px = recipe.validation.image_px or chosen.image_px
    view = View(image_px, recipe.validation.crop_ratio, chosen.rect_val)
    number = shards.num_images("val")
    rows = range(0, number, max(1, number // images))[:images]
    batches = list(ValidationImages(shards, view, images, rows).read([0]))
    shape = f"short side {image_px} px" if view.rectangular else f"{image_px} x {image_px} px"
    title = f"val, phase {phase}: {shape}, centre crop {view.crop_ratio:g} of the side"
    return _sheet(title, batches, shards, images)


def _sheet(title: str, batches: list[Batch], shards: ShardSet, images: int) -> Sheet:
    pixels = [image for batch in batches for image in batch.pixels][:images]
    labels = [label for batch in batches for label in batch.labels][:images]
    return Sheet(title, pixels, [shards.classes[label] for label in labels])


def _checked(recipe: Recipe, phase: int) -> int:
    if not 0 <= phase < len(recipe.phases):
        raise RaytrainError(f"--phase {phase}: the recipe has phases 0 to {len(recipe.phases) - 1}")
    return phase
