"""What a plan will do, for people: a table of its phases and a picture of its curves."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from raytrain.errors import RaytrainError
from raytrain.recipe.plan import PhaseSpan, Plan, Step

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SAMPLES = 2000  # steps drawn of a long run: more than the picture has pixels


def plan_table(plan: Plan) -> Table:
    """Return a table with one row per phase and a row of totals, read from the plan's steps.

    Batches and the largest step are in images, samples are images with repeats.
    """
    table = Table(
        title=_title(plan),
        title_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=0,  # ImageNet's numbers fit 80 columns, just
        show_footer=True,
    )
    for header, footer in (
        ("phase", "all"),
        ("epochs", str(plan.num_epochs)),
        ("image\npx", ""),
        ("batch", ""),
        ("largest\nstep", ""),
        ("steps", f"{plan.num_steps:,}"),
        ("lr", ""),
        ("momentum", ""),
        ("weight\ndecay", ""),
        ("samples", f"{plan.samples_before(plan.num_steps):,}"),
    ):
        # In a narrow window only what goes "from → to" is broken, and only between numbers.
        curve = header in ("lr", "momentum", "weight\ndecay")
        width = len("0.0123 →") if curve else None
        table.add_column(header, footer=footer, justify="right", no_wrap=not curve, min_width=width)
    for span in plan.phases:
        steps = list(_sampled(plan, span))
        table.add_row(
            str(span.index),
            str(span.num_epochs),
            str(span.phase.image_px),
            f"{span.phase.batch:,}",
            f"{max(step.count for step in steps):,}",
            f"{span.num_steps:,}",
            _course([step.lr for step in steps]),
            _course([step.momentum for step in steps]),
            _course([step.weight_decay for step in steps]),
            f"{plan.num_images * span.num_epochs:,}",
        )
    return table


def draw_plan(plan: Plan, path: Path) -> None:
    """Write a PNG of lr, momentum, weight decay, image size and batch over the epochs.

    Weight decay is left out where it is 0 all along. Raises RaytrainError where the file can't
    be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 (slow to import)
    from matplotlib.figure import Figure  # noqa: PLC0415

    steps = [step for span in plan.phases for step in _sampled(plan, span)]
    rows: list[tuple[str, list[float]]] = [
        ("learning rate", [step.lr for step in steps]),
        ("momentum", [step.momentum for step in steps]),
        ("weight decay", [step.weight_decay for step in steps]),
        ("image size (px)", [step.image_px for step in steps]),
        ("global batch\n(images)", [step.count for step in steps]),
    ]
    rows = [(name, values) for name, values in rows if name != "weight decay" or any(values)]

    figure = Figure(figsize=(9, 1.6 * len(rows) + 0.9), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(_title(plan))
    all_axes = figure.subplots(len(rows), 1, sharex=True, squeeze=False)[:, 0]
    epochs = [step.epoch_progress for step in steps]
    for axes, (name, values) in zip(all_axes, rows, strict=True):
        # A step holds its values until the next, the last one until the run ends.
        axes.step([*epochs, plan.num_epochs], [*values, values[-1]], where="post", linewidth=1.8)
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
        if name != "momentum":  # all else is compared by ratio: show where 0 is
            axes.set_ylim(0, 1.15 * max(values) or 1)
        _shade_phases(axes, plan.phases)
    _name_phases(all_axes[0], plan.phases)
    all_axes[-1].set_xlabel("epoch")
    all_axes[-1].set_xlim(0, plan.num_epochs)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise RaytrainError(
            f"{path}: can't write the picture: {error.strerror}; give a file in a folder that "
            "exists and may be written"
        ) from error


def _sampled(plan: Plan, span: PhaseSpan) -> Iterator[Step]:
    """Yield steps of a phase in order: evenly chosen, and those around the curves' corners."""
    first, end = span.first_step, span.first_step + span.num_steps
    wanted = {first, end - 1, *range(first, end, max(1, plan.num_steps // _SAMPLES))}
    corners = {piece.end for curve in plan.curves.values() for piece in curve.spans}
    for corner in corners:
        s = bisect_left(range(plan.num_steps), corner, key=lambda s: plan.step(s).epoch_progress)
        wanted |= {s - 1, s}
    return (plan.step(s) for s in sorted(wanted) if first <= s < end)


def _title(plan: Plan) -> str:
    counts = ((plan.num_images, "image"), (plan.num_epochs, "epoch"), (plan.num_steps, "step"))
    return ", ".join(f"{count:,} {noun}{'' if count == 1 else 's'}" for count, noun in counts)


def _course(values: Sequence[float]) -> str:
    """Write how a hyperparameter goes: first → last, with a peak or a valley between them."""
    first, last = values[0], values[-1]
    stops = [first]
    if max(values) > max(first, last):
        stops.append(max(values))
    if min(values) < min(first, last):
        stops.append(min(values))
    stops.append(last)
    texts = [f"{value:.3g}" for value in stops]
    return " → ".join(text for i, text in enumerate(texts) if i == 0 or text != texts[i - 1])


def _shade_phases(axes: Axes, spans: Sequence[PhaseSpan]) -> None:
    for span in spans:
        end = span.first_epoch + span.num_epochs
        axes.axvspan(
            span.first_epoch, end, color="tab:gray", alpha=0.05 + 0.09 * (span.index % 2), lw=0
        )


def _name_phases(axes: Axes, spans: Sequence[PhaseSpan]) -> None:
    """Write each phase's number above its share of the top picture."""
    num_epochs = spans[-1].first_epoch + spans[-1].num_epochs
    for span in spans:
        wide = span.num_epochs > 0.08 * num_epochs
        axes.annotate(
            f"phase {span.index}" if wide else str(span.index),
            (span.first_epoch + span.num_epochs / 2, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            fontsize=9,
        )
