"""What a user asks of `raytrain plan`, and the answer."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from raytrain.errors import RaytrainError
from raytrain.predict.cluster import Cluster, read_cluster
from raytrain.predict.constants import IMAGENET_IMAGES, SOFTWARE, Software
from raytrain.predict.decode import MEASURED, DecodeCost
from raytrain.predict.model import Forecast, Site, forecasts, images_that_fit
from raytrain.recipe.plan import Plan
from raytrain.recipe.types import Recipe


@dataclass(frozen=True)
class Request:
    """Where, and within what.

    Attributes:
        cluster: a cluster file.
        images: training images.
        machine: type of the nodes with GPUs, in place of the file's.
        software: in `SOFTWARE`: what trains.
        bench: what `raytrain bench input --json` wrote on such a machine.
        nodes: number of nodes to tell the phases of; None: the file's most.
        target_minutes: to be kept with the cheapest number of nodes.
        usd_per_node_hour: price of a node; None: the table's, where it has one.
    """

    cluster: Path
    images: int = IMAGENET_IMAGES
    machine: str | None = None
    software: str = "raytrain"
    bench: Path | None = None
    nodes: int | None = None
    target_minutes: float | None = None
    usd_per_node_hour: float | None = None


@dataclass(frozen=True)
class Quote:
    """The answer.

    Attributes:
        request: what was asked.
        cluster: what its file says.
        runs: the prediction for each number of nodes.
        chosen: the one to tell the phases of.
    """

    request: Request
    cluster: Cluster
    runs: Mapping[int, Forecast]
    chosen: Forecast

    @property
    def in_time(self) -> bool:
        """Whether the target is kept, or there is none."""
        minutes = self.request.target_minutes
        return minutes is None or self.chosen.seconds <= 60 * minutes

    @property
    def usd_per_node_hour(self) -> float | None:
        """The user's price, else the table's."""
        given = self.request.usd_per_node_hour
        return self.cluster.machine.usd_per_hour if given is None else given

    def cost(self, run: Forecast) -> float | None:
        """USD of a run's nodes from start-up to the end; None without a price."""
        price = self.usd_per_node_hour
        return None if price is None else price * run.node_hours

    def notes(self) -> Iterator[str]:
        """What the user should know of the chosen run."""
        plan, request = self.chosen.plan, self.request
        if max(self.runs) < (request.nodes or self.cluster.most_nodes):
            yield (
                f"More than {max(self.runs)} nodes have more GPUs than a step has images "
                f"({plan.min_count})."
            )
        too_many = list(self._phases_that_do_not_fit())
        if too_many and plan.recipe.memory.images_per_pass is None:
            yield (
                f"More images on a GPU at once than about fit: {', '.join(too_many)}; predicted in "
                "several passes: --set memory.images_per_pass=N."
            )
        precision = plan.recipe.precision
        if self.chosen.site.software.decodes_as_we:
            yield "The speeds are NVIDIA's for PyTorch; raytrain wasn't run on such GPUs yet."
            if precision.dtype != "fp32" and not precision.channels_last:
                yield "They are with precision.channels_last: true, which is off here."
            if plan.recipe.input.decoder.startswith("dali"):
                yield "The decode cores' time is that of input.decoder: cpu."

    def _phases_that_do_not_fit(self) -> Iterator[str]:
        for phase in self.chosen.phases:
            fit = images_that_fit(self.chosen.plan, self.cluster.machine, phase.span.phase.image_px)
            if phase.images_per_gpu > fit:
                yield f"phase {phase.span.index} {phase.images_per_gpu:,} > {fit:,}"


def quote(recipe: Recipe, request: Request) -> Quote:
    """Predict a recipe on each number of nodes that a cluster file allows.

    Raises:
        RaytrainError: something asked for isn't known or can't be read.
    """
    if request.nodes is not None and request.target_minutes is not None:
        raise RaytrainError("--nodes and --target-minutes: give one; the target chooses the nodes")
    cluster = read_cluster(request.cluster, request.machine)
    decode = DecodeCost.read(request.bench) if request.bench else MEASURED
    site = Site(cluster.machine, _software(request.software), decode)
    plan = Plan(recipe, request.images)
    runs = forecasts(plan, site, max(cluster.most_nodes, request.nodes or 1))
    if request.target_minutes is not None:
        chosen = _cheapest(runs, 60 * request.target_minutes)
    else:
        chosen = runs[min(request.nodes or cluster.most_nodes, max(runs))]
    return Quote(request, cluster, runs, chosen)


def _cheapest(runs: Mapping[int, Forecast], seconds: float) -> Forecast:
    """The one of least node hours, and so cost, that ends in time; else the fastest."""
    in_time = [run for run in runs.values() if run.seconds <= seconds]
    if not in_time:
        return min(runs.values(), key=lambda run: run.seconds)
    return min(in_time, key=lambda run: run.node_hours)


def _software(name: str) -> Software:
    if name not in SOFTWARE:
        close = difflib.get_close_matches(name, SOFTWARE, n=1)
        mend = f"did you mean {close[0]}?" if close else f"known are {', '.join(SOFTWARE)}"
        raise RaytrainError(f"--software: {name} isn't known; {mend}")
    return SOFTWARE[name]
