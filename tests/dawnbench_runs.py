"""Five public DAWNBench runs: what they did, what is predicted for them, what fits them.

`python -m tests.dawnbench_runs` prints the tables of docs/plan.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from raytrain.predict.constants import IMAGENET_IMAGES, MACHINES, SOFTWARE
from raytrain.predict.decode import MEASURED
from raytrain.predict.model import Site, forecast
from raytrain.recipe.load import recipe_from_dict
from raytrain.recipe.plan import Plan
from raytrain.run.dawnbench import read_entry

FOLDER: Final = Path(__file__).parents[2] / "shared" / "data" / "dawnbench"

Sites = Mapping[str, Site]


@dataclass(frozen=True)
class PublicRun:
    """One entry.

    Attributes:
        file: of the entry, without suffix.
        machine: in `MACHINES`.
        nodes: how many.
        software: in `SOFTWARE`.
        phases: (epochs, image px, global batch), from the entry's `misc`.
    """

    file: str
    machine: str
    nodes: int
    software: str
    phases: tuple[tuple[int, int, int], ...]

    @property
    def site(self) -> Site:
        return Site(MACHINES[self.machine], SOFTWARE[self.software], MEASURED)

    @property
    def plan(self) -> Plan:
        phases = [{"epochs": e, "image_px": px, "batch": b} for e, px, b in self.phases]
        return Plan(
            recipe_from_dict(
                {
                    "model": {"name": "resnet50"},
                    "phases": phases,
                    "schedule": {"lr": 1.0},
                    "precision": {"dtype": "fp16", "channels_last": True},
                }
            ),
            IMAGENET_IMAGES,
        )

    def epoch_seconds(self) -> list[float]:
        """Of each epoch that the entry has, the first with start-up."""
        entry = read_entry(FOLDER / f"{self.file}.json", FOLDER / f"{self.file}.tsv")
        ends = [point.hours * 3600 for point in entry.points if point.hours > 0]
        return [end - begin for begin, end in zip([0.0, *ends], ends, strict=False)]

    def phase_seconds(self) -> list[list[float]]:
        """The same by phase; what the entry's end cuts off is missing."""
        left = self.epoch_seconds()
        parts: list[list[float]] = []
        for epochs, _, _ in self.phases:
            parts.append(left[:epochs])
            left = left[epochs:]
        return parts


RUNS: Final = {
    "fast.ai 16x8": PublicRun(
        "fastai_resnet50_p3_16_machine_pytorch",
        "p3.16xlarge",
        16,
        "fastai-2018",
        ((6, 128, 8192), (10, 128, 16384), (3, 224, 8192), (18, 224, 24576), (3, 288, 16384)),
    ),
    "MoXing 2018 16x8": PublicRun(
        "huaweicloud_resnet50_modelarts_10m28",
        "modelarts-8xV100",
        16,
        "moxing-2018",
        ((21, 128, 28672), (21, 224, 28672), (2, 288, 16384)),
    ),
    "MoXing 2019 16x8": PublicRun(
        "huaweicloud_resnet50_modelarts_16_machine_tensorflow18",
        "modelarts-8xV100",
        16,
        "moxing-2019",
        ((15, 96, 32768), (16, 128, 32768), (4, 224, 32768), (1, 288, 16384)),
    ),
    "AIACC 16x8": PublicRun(
        "alibabacloud_resnet50_gn6e_16_machine_tensorflow",
        "ecs.gn6e-c12g1.24xlarge",
        16,
        "aiacc-2020",
        ((13, 96, 32768), (11, 128, 32768), (3, 224, 32768), (1, 288, 16384)),
    ),
    "AIACC 1x8": PublicRun(
        "alibabacloud_resnet50_gn6e_1_machine_tensorflow",
        "ecs.gn6e-c12g1.24xlarge",
        1,
        "aiacc-2020",
        ((12, 96, 2048), (6, 128, 2048), (2, 224, 2048), (1, 288, 1024)),
    ),
}


@dataclass(frozen=True)
class Comparison:
    """A phase, or a whole run where `image_px` is None: public and predicted seconds.

    Those of a phase are of an epoch: the mean of all but its first, or of its only one. Those of a
    run are up to its entry's last epoch.
    """

    run: str
    image_px: int | None
    batch: int | None
    epochs: int
    public: float
    predicted: float

    @property
    def is_counted(self) -> bool:
        """Whether it is a phase of at least two epochs."""
        return self.image_px is not None and self.epochs > 1

    @property
    def error(self) -> float:
        """Of the predicted throughput, or of the time of a whole run, as a share."""
        by = self.predicted / self.public
        return by - 1 if self.image_px is None else 1 / by - 1


def compare(name: str, site: Site | None = None) -> list[Comparison]:
    """A run's phases, then the whole run; predicted with the constants, or with another site."""
    run = RUNS[name]
    made = forecast(run.plan, site or run.site, run.nodes)
    rows, predicted = [], made.start_up
    for (_, image_px, batch), part, phase in zip(
        run.phases, run.phase_seconds(), made.phases, strict=True
    ):
        each = phase.epoch_seconds + phase.validation
        predicted += phase.switch + len(part) * each
        public = float(np.mean(part[1:] or part))
        rows.append(Comparison(name, image_px, batch, len(part), public, each))
    total = run.epoch_seconds()
    return [*rows, Comparison(name, None, None, len(total), sum(total), predicted)]


def fit(
    make: Callable[[Sequence[float]], Sites], start: Sequence[float], runs: Sequence[str]
) -> list[float]:
    """Least squares of the log of an epoch's time over the counted phases, by Gauss-Newton.

    Args:
        make: the sites that some constants (> 0) give, by name of run.
        start: constants to start from.
        runs: to fit.
    """

    def residuals(logs: np.ndarray[tuple[int], np.dtype[np.float64]]) -> list[float]:
        sites = make([math.exp(x) for x in logs])
        rows = [row for name in runs for row in compare(name, sites[name])]
        return [math.log(row.predicted / row.public) for row in rows if row.is_counted]

    logs = np.log(np.array(start))
    for _ in range(20):
        here = np.array(residuals(logs))
        slopes = [np.array(residuals(logs + step)) - here for step in 1e-4 * np.eye(len(logs))]
        move = np.linalg.lstsq(np.array(slopes).T / 1e-4, -here, rcond=1e-6)[0]
        logs = logs + np.clip(move, -1, 1)
    return [math.exp(x) for x in logs]


XLA_RUNS: Final = ("MoXing 2019 16x8", "AIACC 16x8", "AIACC 1x8")


def xla_sites(values: Sequence[float]) -> Sites:
    """The runs with XLA, for (ms of a pass, images/s, ms of coordination)."""
    pass_ms, images_per_s, coordination_ms = values
    sites = {}
    for name in XLA_RUNS:
        site = RUNS[name].site
        gpu = replace(site.machine.gpu, pass_ms=pass_ms)
        software = replace(
            site.software,
            images_per_s={gpu.name: images_per_s},
            coordination_ms=coordination_ms,
        )
        sites[name] = replace(site, machine=replace(site.machine, gpu=gpu), software=software)
    return sites


def moxing_2018_sites(values: Sequence[float]) -> Sites:
    """MoXing 2018, for (images/s, most Gbit/s)."""
    name = "MoXing 2018 16x8"
    site = RUNS[name].site
    speed = {site.machine.gpu.name: values[0]}
    software = replace(site.software, images_per_s=speed, most_gbit_s=values[1])
    return {name: replace(site, software=software)}


def fastai_sites(values: Sequence[float]) -> Sites:
    """fast.ai, for (us of a hop, seconds of a pause)."""
    name = "fast.ai 16x8"
    site = RUNS[name].site
    machine = replace(site.machine, hop_us=values[0])
    return {
        name: replace(site, machine=machine, software=replace(site.software, pause_s=values[1]))
    }


def without_own_runs(name: str) -> Site:
    """The site of a run whose software no other run used, from vendors and the other four runs."""
    site = RUNS[name].site
    xla = SOFTWARE["aiacc-2020"]
    software = replace(
        site.software,
        # Horovod's issue 1673: TensorFlow without XLA; fast.ai's figure is NVIDIA's already
        images_per_s={"V100": 831.0} if name.startswith("MoXing") else site.software.images_per_s,
        start_up=xla.start_up,
        coordination_ms=xla.coordination_ms,
        most_gbit_s=math.inf,
        pause_s=0.0,
        switch_s=0.0,
    )
    return replace(site, software=software, machine=replace(site.machine, hop_us=10.0))


def left_out(name: str) -> list[Comparison]:
    """The run predicted with constants for which it wasn't used."""
    if name not in XLA_RUNS:
        return compare(name, without_own_runs(name))
    others = [other for other in XLA_RUNS if other != name]
    return compare(name, xla_sites(fit(xla_sites, (20, 1200, 10), others))[name])


def as_table(rows: Sequence[Comparison]) -> list[str]:
    """Lines of Markdown."""
    lines = ["| run | phase | epochs | public | predicted | error |", "|---|---|---|---|---|---|"]
    for row in rows:
        if row.image_px is None:
            what, values = "**total, s**", (row.public, row.predicted)
        else:
            what = f"{row.image_px} px, batch {row.batch:,}"
            values = (IMAGENET_IMAGES / row.public, IMAGENET_IMAGES / row.predicted)
        cells = " | ".join(f"{value:,.0f}" for value in values)
        lines.append(f"| {row.run} | {what} | {row.epochs} | {cells} | {100 * row.error:+.1f} % |")
    return lines


def main() -> None:
    """Print what docs/plan.md shows."""
    print("fit of the runs with XLA (ms of a pass, images/s, ms of coordination):")
    print([round(value, 2) for value in fit(xla_sites, (20, 1200, 10), XLA_RUNS)])
    print("fit of MoXing 2018 (images/s, Gbit/s):")
    print([round(v, 2) for v in fit(moxing_2018_sites, (800, 10), ["MoXing 2018 16x8"])])
    print("fit of fast.ai (us of a hop, seconds of a pause at 224 px):")
    print([round(v, 2) for v in fit(fastai_sites, (50, 10), ["fast.ai 16x8"])])
    print("\n".join(as_table([row for name in RUNS for row in compare(name)])))
    print("left out:")
    print("\n".join(as_table([row for name in RUNS for row in left_out(name)])))


if __name__ == "__main__":
    main()
