"""A quote for people: tables in a terminal's width, and a picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table

from raytrain.errors import RaytrainError
from raytrain.predict.model import Forecast, Limit, PhaseForecast
from raytrain.predict.quote import Quote
from raytrain.run.format import duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_COLUMNS = 7  # numbers of nodes beside each other in 80 columns
_WIDTH, _GAP = 80, 2  # of a terminal, and between columns
_MARKS: dict[Limit, str] = {"GPU": " ", "exchange": "x", "decode": "d", "storage": "s"}
_BLUE, _ORANGE, _GREY, _INK = "#1b62a5", "#d9822b", "#8a8f98", "#2b2f36"
_COLORS = (_BLUE, _ORANGE, "#2a8f6d", "#b03a5b", "#6f56a8", "#7a6a3a", "#3aa6b9", "#55606e")


def told(quote: Quote) -> Group:
    """All of a quote as text: the chosen run by phase, its times, and other numbers of nodes."""
    sums, outcome, notes = _sums(quote), _outcome(quote), quote.notes()
    head, phases, nodes = _title(quote), _phase_table(quote), _node_table(quote)
    return Group(head, "", phases, "", *sums, "", nodes, "", *outcome, *notes)


def counts_shown(quote: Quote) -> list[int]:
    """1, 2, 4, ... nodes, the most, and the chosen one; the largest where there are many."""
    most = max(quote.runs)
    powers = {2**k for k in range(most.bit_length())}
    ordinary = sorted(powers | {most} - {quote.chosen.nodes})
    return sorted({*ordinary[-_MOST_COLUMNS + 1 :], quote.chosen.nodes})


def _title(quote: Quote) -> str:
    run, machine = quote.chosen, quote.cluster.machine
    plan = run.plan
    return (
        f"{run.nodes} x {quote.cluster.machine_name} ({run.gpus} {machine.gpu.name}, "
        f"{machine.gbit_s:g} Gbit/s a node), software {quote.request.software}; "
        f"{plan.num_images:,} images, {plan.num_epochs} epochs, {plan.num_steps:,} steps"
    )


def _phase_table(quote: Quote) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=0)
    for header in (
        "#",
        "px",
        "batch",
        "img/s\na GPU",
        "img/s\nin all",
        "GPU\nms",
        "exchange\n(seen)",
        "decode\nms",
        "read\nms",
        "binds",
        "s an\nepoch",
        "epochs",
    ):
        table.add_column(header, justify="left" if header == "binds" else "right", no_wrap=True)
    for phase in quote.chosen.phases:
        table.add_row(*_phase_cells(quote.chosen, phase))
    return table


def _phase_cells(run: Forecast, phase: PhaseForecast) -> Iterator[str]:
    step, images_per_s = phase.step, run.images_per_s(phase)
    yield str(phase.span.index)
    yield str(phase.span.phase.image_px)
    yield f"{phase.span.phase.batch:,}"
    yield f"{images_per_s / run.gpus:,.0f}"
    yield f"{images_per_s:,.0f}"
    yield f"{1e3 * step.gpu:,.0f}"
    yield f"{1e3 * step.exchange:,.0f} ({1e3 * step.exposed:,.0f})"
    for part in (step.decode, step.storage):
        yield f"{1e3 * part:,.0f}" if run.site.software.decodes_as_we else "-"
    yield step.limit
    yield f"{phase.epoch_seconds:,.1f}"
    yield str(phase.span.num_epochs)


def _sums(quote: Quote) -> Iterator[str]:
    run = quote.chosen
    parts = [f"{name} {seconds:.1f}" for name, seconds in run.site.software.start_up.items()]
    waits = {
        "validation": sum(phase.validations * phase.validation for phase in run.phases),
        "pauses": sum(phase.switch + phase.span.num_epochs * phase.pause for phase in run.phases),
        "first reading": sum(phase.cold for phase in run.phases),
    }
    shown = ", ".join(f"{duration(s)} {name}" for name, s in waits.items() if s >= 0.05)
    yield f"start-up {duration(run.start_up)}" + (f": {', '.join(parts)}" if parts else "")
    yield f"to the end of the recipe {duration(run.seconds)}" + (f", with {shown}" if shown else "")
    cost, price = quote.cost(run), quote.usd_per_node_hour
    if cost is None:
        yield f"{run.node_hours:,.2f} node hours; --price-per-hour gives the cost"
    else:
        source = quote.cluster.machine.price_source
        said = "" if quote.request.usd_per_node_hour is not None else f", {source}"
        yield f"{run.node_hours:,.2f} node hours, {cost:,.2f} USD ({price:,.2f} an hour{said})"


def _node_table(quote: Quote) -> Table:
    names = [f"phase {index}, img/s" for index in range(len(quote.chosen.phases))]
    names += ["start-up, s", "all, h:mm:ss"]
    if quote.usd_per_node_hour is not None:
        names.append("cost, USD")
    names.append("efficiency")
    columns = list(_columns_that_fit(quote, max(map(len, names))))
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("nodes", no_wrap=True)
    for nodes, _ in columns:
        table.add_column(nodes, justify="right", no_wrap=True)
    for name, *cells in zip(names, *(cells for _, cells in columns), strict=True):
        table.add_row(name, *cells)
    return table


def _columns_that_fit(quote: Quote, names_width: int) -> list[tuple[str, list[str]]]:
    """Heads and cells of the table of nodes; the fewest nodes go where they make it too wide."""
    counts = counts_shown(quote)
    while True:
        runs = [quote.runs[nodes] for nodes in counts]
        columns = [(f"{run.nodes} ", list(_node_cells(quote, run, runs[0]))) for run in runs]
        width = sum(_GAP + max(map(len, cells)) for _, cells in columns)
        if names_width + width <= _WIDTH or len(counts) <= 2:
            return columns
        counts.remove(next(nodes for nodes in counts if nodes != quote.chosen.nodes))


def _node_cells(quote: Quote, run: Forecast, fewest: Forecast) -> Iterator[str]:
    for phase in run.phases:
        yield f"{run.images_per_s(phase):,.0f}{_MARKS[phase.step.limit]}"
    yield f"{run.start_up:.1f} "
    yield f"{_clock(run.seconds)} "
    if (cost := quote.cost(run)) is not None:
        yield f"{cost:,.2f} "
    yield f"{fewest.node_hours / run.node_hours:.2f} "


def _clock(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def _outcome(quote: Quote) -> Iterator[str]:
    yield "Exchange: in milliseconds; in brackets what of it the backward pass doesn't hide."
    yield "What binds: x gradient exchange, d decode cores, s storage read, else the GPUs."
    yield "Efficiency: node hours of the fewest nodes over those of these."
    yield "Counted from machines that run already, and without the head."
    minutes = quote.request.target_minutes
    if minutes is None:
        return
    run = quote.chosen
    nodes = f"{run.nodes} node{'s' if run.nodes > 1 else ''}"
    if quote.in_time:
        yield f"{minutes:g} min: the cheapest is {nodes}, {duration(run.seconds)}"
    else:
        yield (
            f"{minutes:g} min: no number of nodes up to {max(quote.runs)} makes it; "
            f"the fastest is {nodes}, {duration(run.seconds)}"
        )


def draw(quote: Quote, path: Path) -> None:
    """Write a PNG: time, cost and images/s by the number of nodes, and a step of each phase.

    Raises RaytrainError where the file can't be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 (slow to import)
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(10, 7.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(_title(quote), x=0.01, ha="left", fontsize=9.5, color=_INK)
    (times, costs), (speeds, steps) = figure.subplots(2, 2)
    _draw_times(times, quote)
    _draw_costs(costs, quote)
    _draw_speeds(speeds, quote)
    _draw_steps(steps, quote)
    for axes in (times, costs, speeds, steps):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e6e8ec", lw=0.7)
        axes.set_axisbelow(True)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise RaytrainError(
            f"{path}: can't write the picture: {error.strerror}; give a file in a folder that "
            "exists and may be written"
        ) from error


def _by_nodes(axes: Axes, quote: Quote) -> None:
    """An axis of nodes, by powers of two, with the chosen number marked."""
    counts = counts_shown(quote)
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(nodes) for nodes in counts])
    axes.minorticks_off()
    axes.set_xlabel("nodes")
    if len(quote.runs) > 1:
        axes.axvline(quote.chosen.nodes, color=_GREY, lw=1, ls=":")


def _draw_times(axes: Axes, quote: Quote) -> None:
    from matplotlib.ticker import LogLocator, NullLocator  # noqa: PLC0415

    minutes = [run.seconds / 60 for run in quote.runs.values()]
    axes.plot(list(quote.runs), minutes, "o-", ms=4, color=_BLUE)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    run = quote.chosen
    title = f"minutes to the end of the recipe ({duration(run.seconds)} on {run.nodes})"
    axes.set_title(title, loc="left", fontsize=10)
    if quote.request.target_minutes is not None:
        axes.axhline(quote.request.target_minutes, color=_ORANGE, lw=1.2, ls="--", label="target")
        axes.legend(frameon=False, fontsize=8)
    _by_nodes(axes, quote)


def _draw_costs(axes: Axes, quote: Quote) -> None:
    paid = quote.usd_per_node_hour is not None
    values = [quote.cost(run) or run.node_hours for run in quote.runs.values()]
    axes.plot(list(quote.runs), values, "o-", ms=4, color=_ORANGE)
    axes.set_ylim(0, 1.15 * max(values))
    axes.set_title("cost, USD" if paid else "node hours", loc="left", fontsize=10)
    _by_nodes(axes, quote)


def _draw_speeds(axes: Axes, quote: Quote) -> None:
    counts = list(quote.runs)
    for index, phase in enumerate(quote.chosen.phases):
        speeds = [run.images_per_s(run.phases[index]) for run in quote.runs.values()]
        color = _COLORS[index % len(_COLORS)]
        label = f"phase {index}, {phase.span.phase.image_px} px"
        axes.plot(counts, speeds, "o-", ms=3.5, lw=1.6, color=color, label=label)
        axes.plot(counts, [n * speeds[0] for n in counts], color=color, lw=0.8, ls=":")
    axes.plot([], [], color=_GREY, lw=0.8, ls=":", label="in proportion to nodes")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_title("images/s of all nodes", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    _by_nodes(axes, quote)


def _draw_steps(axes: Axes, quote: Quote) -> None:
    """Bars: what a step's time is made of, by phase."""
    phases = quote.chosen.phases
    names = [f"{phase.span.index}: {phase.span.phase.image_px} px" for phase in phases]
    gpu = [1e3 * phase.step.gpu for phase in phases]
    exposed = [1e3 * phase.step.exposed for phase in phases]
    waiting = [1e3 * (p.step.seconds - p.step.gpu - p.step.exposed) for p in phases]
    below = [a + b for a, b in zip(gpu, exposed, strict=True)]
    axes.bar(names, gpu, color=_BLUE, label="GPU")
    axes.bar(names, exposed, bottom=gpu, color=_ORANGE, label="exchange, not hidden")
    axes.bar(names, waiting, bottom=below, color=_GREY, label="waiting for images")
    axes.set_ylim(0, 1.3 * max(a + b for a, b in zip(below, waiting, strict=True)))
    axes.set_title(f"a step on {quote.chosen.nodes} nodes, ms", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8, ncols=3)
