"""Every constant of the prediction, each with its source.

"fit" is a least-squares fit of the model to five public DAWNBench runs (docs/plan.md says how, with
the errors that remain); the runs are those of https://github.com/stanford-futuredata/dawn-bench-entries
dated 2018-09-06 (fast.ai), 2018-11-22 and 2019-05-08 (MoXing), 2020-03-10 and 2020-03-17 (AIACC).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

RESNET50: Final = "resnet50"


@dataclass(frozen=True, slots=True)
class Network:
    """A neural network's size."""

    gmacs: float
    """1e9 multiply-adds of one image of 224 px, forward."""
    params: float
    """Millions of parameters."""


NETWORKS: Final[Mapping[str, Network]] = {
    "resnet18": Network(1.81, 11.69),
    "resnet34": Network(3.66, 21.80),
    RESNET50: Network(4.09, 25.56),
    "resnet101": Network(7.80, 44.55),
    "resnet152": Network(11.51, 60.19),
}
"""From torchvision's tables of its weights. A network other than ResNet-50 is taken to be slower or
faster in proportion to its multiply-adds, which wasn't checked."""

SLIM_RESNET50: Final = Network(3.48, 25.56)
"""TF-slim's resnet_v1_50, the network of MoXing's entries: it halves the image in the last unit of
each block, not in the first of the next (counted layer by layer)."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A type of GPU."""

    name: str
    pass_ms: float
    """What a forward and backward pass costs whatever its images."""
    fp32_share: float
    """Speed in fp32 (on A100 and later TF32) as a share of that in mixed precision."""
    has_bf16: bool


# pass_ms of V100: fit, mostly of the run on one node; of others by the bandwidth of their memory
# (assumed; 900, 1555 and 3350 GB/s in NVIDIA's data sheets).
# fp32_share: NVIDIA DeepLearningExamples, ResNet50 v1.5 for PyTorch, 8 GPUs, container 21.03;
# H100 has no figure of its own there and gets A100's.
V100: Final = Gpu("V100", 23.2, 2855 / 8322, has_bf16=False)
A100: Final = Gpu("A100", 23.2 * 900 / 1555, 7248 / 16621, has_bf16=True)
H100: Final = Gpu("H100", 23.2 * 900 / 3350, 7248 / 16621, has_bf16=True)

PIXELS_PER_GB: Final = 0.71e6
"""Pixels of one pass that fit a GB of GPU memory in mixed precision: fast.ai's 224 images of 224 px
on 16 GB, "largest batch size that fits" (github.com/cybertronai/imagenet18, train.py)."""


@dataclass(frozen=True, slots=True)
class Software:
    """How a generation of training software uses the hardware."""

    images_per_s: Mapping[str, float]
    """Of one GPU, by its type: ResNet-50 v1.5, mixed precision, 224 px, 256 images a pass, nothing
    else in the way."""
    start_up: Mapping[str, float]
    """Seconds before the first step, itemised."""
    resnet50: Network = NETWORKS[RESNET50]
    """What it takes for ResNet-50."""
    gradient_bytes: int = 4
    """Of a parameter, in the exchange."""
    bucket_mb: float | None = None
    """Gradients sent at once; None: all."""
    overlaps: bool = True
    """Whether gradients are exchanged while the backward pass still runs."""
    most_gbit_s: float = float("inf")
    """Gbit/s of a node that it can use at most."""
    coordination_ms: float = 0.0
    """Of a step, where there are several nodes."""
    pause_s: float = 0.0
    """Begin of an epoch without training, at 224 px; by the pixels of an image at other sizes. A
    new phase takes a second one."""
    switch_s: float = 0.0
    """Begin of a new phase without training."""
    counts_validation: bool = False
    """Whether training waits for validation, within the clock."""
    decodes_as_we: bool = False
    """Whether decoding and reading cost what ours do; else the speeds above contain them."""


_XLA: Final = Software(
    # fit of three runs; Horovod's issue 1673 measured 1237 on one V100 without exchange
    images_per_s={"V100": 1149},
    start_up={"first steps": 0.4},  # fit: 0, 0.4 and 0.8 s
    gradient_bytes=2,  # "horovod_compression": "fp16" in the entry of 2019
    # XLA's clusters end after the backward pass, and Horovod hears of gradients only then
    # (github.com/horovod/horovod/issues/1673); the fit agrees: the same for every image size
    overlaps=False,
    # fit: Horovod's cycles and the agreement of all ranks, packing, LARS
    coordination_ms=14.5,
)

SOFTWARE: Final[Mapping[str, Software]] = {
    "raytrain": Software(
        images_per_s={
            # NVIDIA DeepLearningExamples, ResNet50 v1.5 for PyTorch, container 21.03, channels
            # last: an eighth of what 8 GPUs reach with real images
            "V100": 8322 / 8,
            "A100": 16621 / 8,
            # 1.85 times A100: MLPerf 3.0, Dell with 16 GPUs, 14.4 and 7.8 min
            # (silvertonconsulting.com, 2023-07-12)
            "H100": 1.85 * 16621 / 8,
        },
        # median of 3 runs of `digits` with 2 CPU workers on 2 busy cores (docs/plan.md); what CUDA,
        # NCCL and cuDNN add wasn't measured
        start_up={"command and Ray": 5.7, "workers": 14.4, "first images": 1.7},
        bucket_mb=25,  # DistributedDataParallel's default bucket_cap_mb, MiB
        counts_validation=True,
        decodes_as_we=True,
    ),
    # MoXing on TensorFlow 1.8 without XLA: 10 m 28 s
    "moxing-2018": Software(
        images_per_s={"V100": 728},  # fit; Horovod's issue 1673 measured 831 without XLA
        start_up={"first steps": 40.4},  # fit: first epoch against the following ones
        resnet50=SLIM_RESNET50,
        overlaps=False,  # sync_before_server: servers get the sum of a node's GPUs
        # fit: parameter servers over grpc+verbs, fp32 (--variable_update=distributed_replicated_mix
        # in its script) use 14 % of the link; what they move is what a ring moves
        most_gbit_s=14.2,
        switch_s=4.4,  # fit: 4.8 and 4.0 s
    ),
    "moxing-2019": replace(_XLA, resnet50=SLIM_RESNET50),
    "aiacc-2020": _XLA,
    # PyTorch 0.4.1
    "fastai-2018": Software(
        # NVIDIA DeepLearningExamples for PyTorch, 2019-06, channels first, 4 GPUs: 2886.9 at a
        # scaling of 3.86
        images_per_s={"V100": 747},
        start_up={"first epoch": 46.7},  # fit: first epoch against the following ones
        gradient_bytes=2,  # the whole network in fp16 (network_to_half in its script)
        bucket_mb=1,  # bucket_bytes_cap of PyTorch 0.4's DistributedDataParallel
        pause_s=12.8,  # fit: new loader processes, their first batch, and validation each epoch
        counts_validation=True,
    ),
}

LINK_SHARE: Final = 0.9
"""Of a link's nominal rate that an exchange of large buffers reaches (assumed; the fit of the runs
is nearly as good with 0.8 to 1)."""

TCP_HOP_US: Final = 61.8
"""One node to the next in a ring over TCP (fit of fast.ai's run, with 49 buckets a step)."""
RDMA_HOP_US: Final = 10.0
"""The same over InfiniBand (assumed: the order of NCCL's latency; MoXing's buffers are so few that
it makes 0.3 ms)."""
EFA_HOP_US: Final = 30.0
"""The same over AWS's EFA (assumed: between the two)."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A type of machine, or of node."""

    gpu: Gpu
    gpus: int
    gpu_memory_gb: int
    vcpus: int
    """Threads; two make a core."""
    gbit_s: float
    """Network, in each direction."""
    hop_us: float
    """One node to the next in a ring."""
    storage_mb_s: float
    """What a node reads its images with."""
    usd_per_hour: float | None = None
    price_source: str = ""


_GP3: Final = 1000.0
"""MB/s of the disks that cluster/*.yaml ask AWS for; taken where nothing is known, too."""

MACHINES: Final[Mapping[str, Machine]] = {
    # EC2 User Guide: accelerated computing instances; EBS-optimized (the smaller two)
    "p3.2xlarge": Machine(V100, 1, 16, 8, 10, TCP_HOP_US, 218),
    "p3.8xlarge": Machine(V100, 4, 16, 32, 10, TCP_HOP_US, 875),
    "p3.16xlarge": Machine(
        V100, 8, 16, 64, 25, TCP_HOP_US, _GP3, 24.48, "on demand, 2018-09 (fast.ai's entry)"
    ),
    "p3dn.24xlarge": Machine(V100, 8, 32, 96, 100, EFA_HOP_US, _GP3),
    "p4d.24xlarge": Machine(
        A100, 8, 40, 96, 400, EFA_HOP_US, _GP3, 14.75, "EC2 Capacity Blocks, end of 2024"
    ),
    "p5.48xlarge": Machine(
        H100, 8, 80, 192, 3200, EFA_HOP_US, _GP3, 39.33, "EC2 Capacity Blocks, end of 2024"
    ),
    # Compute Engine: GPU machine types, network bandwidths (with gVNIC); a disk of 1 TB pd-ssd
    "n1-standard-96+8xV100": Machine(V100, 8, 16, 96, 100, TCP_HOP_US, 480),
    "a2-highgpu-8g": Machine(A100, 8, 40, 96, 100, TCP_HOP_US, 480),
    "a3-highgpu-8g": Machine(H100, 8, 80, 208, 1000, TCP_HOP_US, 480),
    # AIACC's entries: "16x8 V100-32G with 32Gbps VPC"
    "ecs.gn6e-c12g1.24xlarge": Machine(
        V100, 8, 32, 96, 32, TCP_HOP_US, _GP3, 20.60, "2020-03 (AIACC's entry)"
    ),
    # MoXing's entries: InfiniBand, taken as 100 Gbit/s (EDR); 256 images of 224 px a GPU, so 32 GB;
    # vCPUs not published
    "modelarts-8xV100": Machine(V100, 8, 32, 64, 100, RDMA_HOP_US, _GP3),
}
"""Machines by the name that a cluster file or --machine gives."""

STORED_BYTES: Final[Mapping[int, float]] = {160: 14_350, 256: 31_580, 352: 53_930}
"""Of an image by the short side, in pixels, of the sizes that `raytrain prepare` makes by default
(mean of 330 ImageNet images at its quality 92)."""
ASPECT: Final = 4 / 3
"""Long over short side of a stored image, about."""
NS_PER_STORED_PIXEL: Final = 4.84
"""Nanoseconds of a core to decode a pixel of the stored image; with the next, the fit of
`raytrain bench input` on those 330 images and an AMD EPYC 9005 (docs/plan.md)."""
NS_PER_CROP_PIXEL: Final = 0.93
"""The same for a pixel of the resized crop."""
STREAM_SHARE: Final = 0.78
"""Of the speed of bare decoding that the stream through Ray Data reaches (a prototype with two
processes on 2 cores)."""

IMAGENET_IMAGES: Final = 1_281_167
VALIDATION_SHARE: Final = 50_000 / IMAGENET_IMAGES
"""Validation images for each training image, as in ImageNet."""
