"""The model: what a step costs, and so what a run takes.

A step is the longest of four things that go on at once on each node:

- **GPU**: each pass costs a fixed time, and each image its multiply-adds, which grow with the
  square of its side, over the GPU's speed. Where a GPU's share of the batch doesn't fit its memory,
  the step takes several passes. To it comes what the backward pass doesn't hide of the
- **gradient exchange**: 2 (n-1)/n times the gradients' bytes go through each node's link (a ring
  over n nodes: Patarasuk and Yuan 2009), each of the buckets that are sent at once takes 2 (n-1)
  hops, and some software a fixed time to agree. Within a node it is part of a pass's fixed time.
- **decode cores**: core time of the node's images over its cores.
- **storage read**: the bytes that the node hasn't read before, over the storage's rate. What it has
  read stays in its memory or cache; each epoch it reads another 1/n of the images, so in the k-th
  epoch at a size (1 - 1/n)^(k-1) of them are new to it.

A run is start-up, epochs of such steps, validations that training waits for, and pauses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from raytrain.errors import RaytrainError
from raytrain.predict.constants import (
    LINK_SHARE,
    NETWORKS,
    PIXELS_PER_GB,
    RESNET50,
    STORED_BYTES,
    VALIDATION_SHARE,
    Gpu,
    Machine,
    Network,
    Software,
)
from raytrain.predict.decode import DecodeCost, stored_px
from raytrain.recipe.plan import PhaseSpan, Plan

Limit = Literal["GPU", "exchange", "decode", "storage"]

_BACKWARD: Final = 2 / 3
"""Share of a pass's time: it has twice the multiply-adds of the forward pass."""
_REFERENCE_IMAGES: Final = 256
_REFERENCE_PX: Final = 224


@dataclass(frozen=True, slots=True)
class Site:
    """Where and with what is trained.

    Attributes:
        machine: type of each node.
        software: what trains.
        decode: what an image costs the CPU.
    """

    machine: Machine
    software: Software
    decode: DecodeCost


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step's parts on the busiest node.

    Attributes:
        gpu: all passes.
        exchange: of the gradients, hidden or not.
        exposed: what of `exchange` the backward pass doesn't hide.
        decode: CPU work.
        storage: reading what isn't in the node's memory or cache.
    """

    gpu: float
    exchange: float
    exposed: float
    decode: float
    storage: float

    @property
    def seconds(self) -> float:
        """Of the step."""
        return max(self.gpu + self.exposed, self.decode, self.storage)

    @property
    def limit(self) -> Limit:
        """What binds: what would shorten the step most if it were free."""
        if self.seconds == self.storage:
            return "storage"
        if self.seconds == self.decode:
            return "decode"
        return "exchange" if self.exposed > self.gpu else "GPU"


@dataclass(frozen=True, slots=True)
class PhaseForecast:
    """A phase of the recipe.

    Attributes:
        span: the phase, placed in the run.
        images_per_gpu: most images of a step on a GPU.
        passes: in which a GPU computes them.
        step: its time in the last epoch.
        cold: seconds that earlier epochs take longer, all together, because storage binds.
        pause: seconds at the begin of each epoch without training.
        switch: seconds at the begin of the phase.
        validation: seconds of each validation that training waits for.
        validations: how many.
    """

    span: PhaseSpan
    images_per_gpu: int
    passes: int
    step: StepTime
    cold: float
    pause: float
    switch: float
    validation: float
    validations: int

    @property
    def epoch_seconds(self) -> float:
        """Of the last epoch, without validation."""
        return self.span.steps_per_epoch * self.step.seconds + self.pause

    @property
    def seconds(self) -> float:
        """Of the phase, with all that training waits for."""
        epochs = self.span.num_epochs * self.epoch_seconds
        return self.switch + epochs + self.cold + self.validations * self.validation


@dataclass(frozen=True, slots=True)
class Forecast:
    """A run on some nodes.

    Attributes:
        plan: what is trained.
        site: where.
        nodes: how many.
        phases: in turn.
    """

    plan: Plan
    site: Site
    nodes: int
    phases: tuple[PhaseForecast, ...]

    @property
    def gpus(self) -> int:
        """Of all nodes."""
        return self.nodes * self.site.machine.gpus

    @property
    def start_up(self) -> float:
        """Seconds before the first step."""
        return sum(self.site.software.start_up.values())

    @property
    def seconds(self) -> float:
        """From the begin to the end of the recipe."""
        return self.start_up + sum(phase.seconds for phase in self.phases)

    @property
    def node_hours(self) -> float:
        """What is paid for, on machines that run already."""
        return self.nodes * self.seconds / 3600

    def images_per_s(self, phase: PhaseForecast) -> float:
        """Of all nodes, over the last epoch of a phase."""
        return self.plan.num_images / phase.epoch_seconds


def forecast(plan: Plan, site: Site, nodes: int) -> Forecast:
    """Predict a run on `nodes` >= 1 nodes.

    Raises:
        RaytrainError: the model's name, the GPU or its number format has no figures; or there are
            more GPUs than a step has images.
    """
    gpus = nodes * site.machine.gpus
    if gpus > plan.min_count:
        raise RaytrainError(
            f"{nodes} nodes have {gpus} GPUs, but a step has {plan.min_count} images in some phase;"
            " use fewer nodes or a larger batch"
        )
    model = _Model(plan, site, nodes, _speed(plan, site))
    return Forecast(plan, site, nodes, tuple(model.phases()))


def images_that_fit(plan: Plan, machine: Machine, image_px: int) -> int:
    """About how many images a GPU can take in one pass."""
    pixels = PIXELS_PER_GB * machine.gpu_memory_gb
    share = 0.5 if plan.recipe.precision.dtype == "fp32" else 1.0
    return max(1, int(share * pixels / image_px**2))


@dataclass(frozen=True, slots=True)
class _Speed:
    """Of one GPU for one network.

    Attributes:
        network: which.
        pass_seconds: of a pass, whatever its images.
        macs_per_s: multiply-adds a second, counted forward, of forward and backward pass together.
    """

    network: Network
    pass_seconds: float
    macs_per_s: float

    def seconds(self, images: float, image_px: int, passes: int) -> float:
        """Of a step's passes over `images` images."""
        macs = self.network.gmacs * 1e9 * (image_px / _REFERENCE_PX) ** 2
        return passes * self.pass_seconds + images * macs / self.macs_per_s


def _speed(plan: Plan, site: Site) -> _Speed:
    gpu = site.machine.gpu
    images_per_s = site.software.images_per_s.get(gpu.name)
    if images_per_s is None:
        known = ", ".join(site.software.images_per_s)
        raise RaytrainError(f"--software: its speed is known on {known} only, not on {gpu.name}")
    pass_seconds = gpu.pass_ms / 1e3
    images_seconds = _REFERENCE_IMAGES / images_per_s - pass_seconds
    macs_per_s = _REFERENCE_IMAGES * NETWORKS[RESNET50].gmacs * 1e9 / images_seconds
    share = _precision_share(plan, gpu)
    return _Speed(_network(plan, site.software), pass_seconds / share, macs_per_s * share)


def _network(plan: Plan, software: Software) -> Network:
    name = plan.recipe.model.name
    if name == RESNET50:
        return software.resnet50
    if name not in NETWORKS:
        raise RaytrainError(
            f"model.name: {name} has no figures to plan with; known are {', '.join(NETWORKS)}: "
            "plan with the one nearest in size, by --set model.name=..."
        )
    return NETWORKS[name]


def _precision_share(plan: Plan, gpu: Gpu) -> float:
    dtype = plan.recipe.precision.dtype
    if dtype == "bf16" and not gpu.has_bf16:
        raise RaytrainError(
            f"precision.dtype: {gpu.name} lacks bf16; use --set precision.dtype=fp16"
        )
    return gpu.fp32_share if dtype == "fp32" else 1.0


@dataclass(frozen=True, slots=True)
class _Model:
    """A run's phases on some nodes."""

    plan: Plan
    site: Site
    nodes: int
    speed: _Speed

    def phases(self) -> Iterator[PhaseForecast]:
        for span in self.plan.phases:
            yield self._phase(span)

    def _phase(self, span: PhaseSpan) -> PhaseForecast:
        software, image_px = self.site.software, span.phase.image_px
        images = -(-self.plan.num_images // span.steps_per_epoch)
        share = -(-images // (self.nodes * self.site.machine.gpus))
        fit = images_that_fit(self.plan, self.site.machine, image_px)
        passes = -(-share // min(fit, self.plan.recipe.memory.images_per_pass or fit))
        pause = software.pause_s * (image_px / _REFERENCE_PX) ** 2
        steps = [self._step(share, image_px, passes, new) for new in self._new_shares(span)]
        late = sum(step.seconds - steps[-1].seconds for step in steps)
        return PhaseForecast(
            span=span,
            images_per_gpu=share,
            passes=passes,
            step=steps[-1],
            cold=span.steps_per_epoch * late,
            pause=pause,
            switch=(software.switch_s + pause) if span.index else 0.0,
            validation=self._validation(image_px) if software.counts_validation else 0.0,
            validations=self._validations(span),
        )

    def _new_shares(self, span: PhaseSpan) -> list[float]:
        """For each epoch of a phase, the share of its images that a node hasn't read before."""
        size = stored_px(span.phase.image_px)
        before = self.plan.recipe.phases[: span.index]
        read = sum(phase.epochs for phase in before if stored_px(phase.image_px) == size)
        return [(1 - 1 / self.nodes) ** (read + epoch) for epoch in range(span.num_epochs)]

    def _step(self, share: int, image_px: int, passes: int, new_share: float) -> StepTime:
        gpu = self.speed.seconds(share, image_px, passes)
        exchange, buckets = self._exchange()
        exposed = exchange
        if self.site.software.overlaps:
            # The last bucket is ready when the backward pass ends; with several passes, only the
            # last one's gradients are exchanged.
            exposed = max(exchange / buckets, exchange - _BACKWARD * gpu / passes)
        decode, storage = self._input(share * self.site.machine.gpus, image_px)
        return StepTime(gpu, exchange, exposed, decode, storage * new_share)

    def _exchange(self) -> tuple[float, int]:
        """Seconds of an exchange, and in how many buckets it is made."""
        software, machine, n = self.site.software, self.site.machine, self.nodes
        size = self.speed.network.params * 1e6 * software.gradient_bytes
        bucket = software.bucket_mb
        buckets = 1 if bucket is None else -(-int(size) // int(bucket * 2**20))
        if n == 1:
            return 0.0, buckets
        rate = 1e9 / 8 * min(LINK_SHARE * machine.gbit_s, software.most_gbit_s)
        wire = 2 * (n - 1) / n * size / rate
        hops = buckets * 2 * (n - 1) * machine.hop_us / 1e6
        return wire + hops + software.coordination_ms / 1e3, buckets

    def _input(self, images: float, image_px: int) -> tuple[float, float]:
        """Seconds of a node's cores and of its storage for `images` images not read before."""
        if not self.site.software.decodes_as_we or self.plan.recipe.input.decoder == "synthetic":
            return 0.0, 0.0
        machine = self.site.machine
        decode = images * self.site.decode.seconds(image_px) / (machine.vcpus / 2)
        read = images * STORED_BYTES[stored_px(image_px)]
        return decode, read / (machine.storage_mb_s * 1e6)

    def _validation(self, trained_px: int) -> float:
        """Seconds of a validation on the GPUs that else train: forward passes over its images."""
        spec, machine = self.plan.recipe.validation, self.site.machine
        image_px = spec.image_px or trained_px
        node_images = VALIDATION_SHARE * self.plan.num_images / self.nodes
        images = node_images / machine.gpus
        passes = -int(-images // spec.batch)
        forward = (1 - _BACKWARD) * self.speed.seconds(images, image_px, passes)
        decode, _ = self._input(node_images, image_px)
        return max(forward, decode)

    def _validations(self, span: PhaseSpan) -> int:
        ends = range(span.steps_per_epoch, span.num_steps + 1, span.steps_per_epoch)
        return sum(self.plan.validates_after(span.first_step + end - 1) for end in ends)


def forecasts(plan: Plan, site: Site, most: int) -> dict[int, Forecast]:
    """Predict the run on each number of nodes from 1 to `most` that a step has images for.

    Raises:
        RaytrainError: as `forecast`; or not even one node's GPUs get an image each.
    """
    useful = max(1, min(most, plan.min_count // site.machine.gpus))
    return {nodes: forecast(plan, site, nodes) for nodes in range(1, useful + 1)}
