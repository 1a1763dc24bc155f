"""The recipe: everything that decides how a model is trained, one small class per section.

All is immutable and strict: an unknown key or a wrong type is an error, and nothing is converted
but a whole number where a fraction is asked for. Constructing a section with bad values raises
pydantic's ValidationError; `load_recipe` and `recipe_from_dict` tell the same in one line.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PlainValidator,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from raytrain.recipe.curve import Curve, CurveError

OptimizerName = Literal["sgd", "nag", "lars", "adamw", "lamb"]
DType = Literal["fp32", "bf16", "fp16"]
ValidationPlace = Literal["beside", "inline"]
ValidationClock = Literal["counted", "outside"]
CacheKind = Literal["disk", "ram", "none"]
DamageRule = Literal["stop", "skip"]
ElasticMode = Literal["restart", "step"]
DecoderName = Literal["auto", "cpu", "dali_cpu", "dali_gpu", "synthetic"]


def _check_scalar(value: object) -> object:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError("must be a number, a text, true, false or null")


def _check_not_empty(phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
    # pydantic's own min_length would also complain of a list whose items are wrong.
    if not phases:
        raise ValueError("must have at least one item")
    return phases


def _check_rising(pair: tuple[float, float]) -> tuple[float, float]:
    if pair[0] > pair[1]:
        raise ValueError(f"the first number must not be above the second, is {list(pair)}")
    return pair


# strict=False on tuples: YAML has lists. The numbers in them stay strict.
Scalar = Annotated[bool | int | float | str | None, PlainValidator(_check_scalar)]
Share = Annotated[float, Field(gt=0, le=1)]
ShareRange = Annotated[tuple[Share, Share], Field(strict=False), AfterValidator(_check_rising)]
Ratio = Annotated[
    tuple[PositiveFloat, PositiveFloat], Field(strict=False), AfterValidator(_check_rising)
]
Bounds = Annotated[
    tuple[NonNegativeFloat, PositiveFloat], Field(strict=False), AfterValidator(_check_rising)
]
Triple = Annotated[tuple[float, float, float], Field(strict=False)]
PositiveTriple = Annotated[tuple[PositiveFloat, PositiveFloat, PositiveFloat], Field(strict=False)]


class Section(BaseModel):
    """What all sections share: immutable, strict types, no unknown keys, finite numbers."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class Model(Section):
    """Which network is trained."""

    name: Annotated[str, Field(min_length=1)]
    """A torchvision name, `timm:NAME`, or `module:function` that returns an nn.Module."""
    args: dict[str, Scalar] = {}
    """Keyword arguments for the function that builds the model, such as `zero_init_residual: true`
    for torchvision's ResNets and `small_resnet` (timm's have it on)."""
    blurpool: bool = False
    """Whether images are blurred before each strided convolution of at least 16 channels."""


class Phase(Section):
    """Some epochs with one image size, batch size and crop area."""

    epochs: PositiveInt
    """Epochs that the phase lasts."""
    image_px: PositiveInt
    """Height and width of the training images, in pixels."""
    batch: PositiveInt
    """Most images in one step, over all workers."""
    crop_area: ShareRange = (0.08, 1.0)
    """Least and most of an image's area that a random crop keeps, shares in (0, 1]."""
    rect_val: bool = False
    """Whether validation images keep their aspect ratio, up to 2:1, in validations after epochs of
    this phase: their short side has the square's pixels. The model must take such images."""


class Schedule(Section):
    """Hyperparameters as curves over the epochs of the run."""

    lr: Curve
    """Learning rate, >= 0."""
    lr_for_batch: PositiveInt | None = None
    """Batch that `lr` is meant for: a phase's learning rate is lr * its batch / this. null: `lr`
    as it stands in every phase."""
    momentum: Curve = Curve.constant(0.9)
    """Momentum, in [0, 1); with adamw and lamb their beta1."""
    weight_decay: Curve = Curve.constant(0.0)
    """Weight decay, >= 0."""


_SETTINGS_OF: dict[str, tuple[OptimizerName, ...]] = {
    "nesterov": ("lars",),
    "eta": ("lars",),
    "trust_ratio": ("lars", "lamb"),
    "beta2": ("adamw", "lamb"),
    "eps": ("adamw", "lamb"),
}


class Optimizer(Section):
    """How gradients change the parameters."""

    name: OptimizerName = "nag"
    """`sgd`: with momentum; `nag`: with Nesterov's momentum; `lars`: for large batches; `adamw`;
    `lamb`: adamw for large batches."""
    decay_norm_and_bias: bool = True
    """Whether weight decay also acts on normalization layers and biases."""
    clip_norm: PositiveFloat | None = None
    """Most that the norm of all gradients together may be: larger ones are scaled down. null: no
    limit."""
    nesterov: bool = False
    """lars: whether its momentum is Nesterov's."""
    eta: PositiveFloat = 0.001
    """lars: the trust ratio where weights and gradients have equal norms."""
    trust_ratio: Bounds | None = None
    """lars, lamb: least and most that a layer's trust ratio may be. null: no limits."""
    beta2: Annotated[float, Field(gt=0, lt=1)] = 0.999
    """adamw, lamb: share of the mean squared gradient that each step keeps."""
    eps: PositiveFloat | None = None
    """adamw, lamb: what is added to the root of the mean squared gradient; null: 1e-8 and 1e-6."""

    @model_validator(mode="after")
    def _has_only_its_own_settings(self) -> Self:
        for key, names in _SETTINGS_OF.items():
            default = type(self).model_fields[key].default
            if self.name not in names and getattr(self, key) != default:
                raise ValueError(f"{key} is a setting of {' and '.join(names)}, not of {self.name}")
        return self


class Loss(Section):
    """What is minimized: cross-entropy."""

    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the label's weight that is spread evenly over all classes, in [0, 1)."""


class Augment(Section):
    """How training images are varied, beside the phase's `crop_area`."""

    flip: bool = True
    """Whether each image is mirrored left to right with probability 1/2."""
    aspect: Ratio = (3 / 4, 4 / 3)
    """Least and most width / height of a random crop, drawn evenly in the logarithm."""
    mixup: NonNegativeFloat = 0.0
    """Images of a step are mixed in pairs, and their labels too, with shares drawn from
    Beta(mixup, mixup). 0: not mixed."""

    @property
    def images_together(self) -> int:
        """Neighbours in a step's order that one worker must have together."""
        return 2 if self.mixup else 1


class Normalize(Section):
    """(pixel - mean) / std for red, green, blue, with pixels in 0..1; by default ImageNet's."""

    mean: Triple = (0.485, 0.456, 0.406)
    """What is subtracted from red, green, blue."""
    std: PositiveTriple = (0.229, 0.224, 0.225)
    """What red, green, blue are then divided by, > 0."""


class Precision(Section):
    """In which numbers and memory order the network computes."""

    dtype: DType = "fp32"
    """Type of the activations; `fp16` comes with adaptive loss scaling."""
    loss_scale: PositiveFloat = 65536.0
    """fp16: factor on the loss in the first step; it adapts from there."""
    tf32: bool = False
    """Whether GPUs may round the inputs of fp32 products to 10 bits, which is faster."""
    channels_last: bool = False
    """Whether tensors of images are stored with the channels last."""

    @model_validator(mode="after")
    def _has_only_its_own_settings(self) -> Self:
        default = type(self).model_fields["loss_scale"].default
        if self.dtype != "fp16" and self.loss_scale != default:
            raise ValueError(f"loss_scale is a setting of dtype fp16, not of {self.dtype}")
        return self


class Ema(Section):
    """An exponential moving average of the weights, validated beside them. Where it is on, its
    accuracy is what the target asks for, and it is what `model.safetensors` holds."""

    decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the average that each update keeps; less in the first updates. null: no average."""
    every_steps: PositiveInt = 1
    """Steps between two updates."""


class Memory(Section):
    """How much a worker computes at once."""

    images_per_pass: PositiveInt | None = None
    """Most images in one forward and backward pass of a worker; more are split in several passes
    whose gradients add up. null: no limit."""


class Validation(Section):
    """When, where and how the model is validated."""

    every_epochs: PositiveInt = 1
    """Validate after each this many epochs, and after the last step in any case."""
    where: ValidationPlace = "beside"
    """`beside`: in an extra process while training goes on; `inline`: training waits."""
    image_px: PositiveInt | None = None
    """Height and width of validation images, in pixels; null: those of the phase just trained. A
    size above the last phase's is FixRes's test resolution (Touvron et al. 2019): random crops
    show objects larger than centre crops do, by about 1.15."""
    crop_ratio: Share = 0.875
    """Side of the centre crop as a share of the resized image's short side, in (0, 1]."""
    batch: PositiveInt = 256
    """Images in one forward pass of a validating process."""
    clock: ValidationClock = "counted"
    """Whether time spent on validation counts in seconds_to_target."""


class Target(Section):
    """Validation accuracy at which training stops; where both are given, both must be reached."""

    top1: Share | None = None
    """Share of images whose best guess is right, in (0, 1]; null: not asked for."""
    top5: Share | None = None
    """Share of images with the label in the best five guesses, in (0, 1]; null: not asked for."""


class Checkpoint(Section):
    """When the state of training is saved, beside the checkpoint at each validation."""

    every_steps: PositiveInt | None = None
    """Save after each this many steps; null: only at validations."""
    memory_steps: PositiveInt | None = None
    """`faults.elastic: restart`: copy the state into memory beside the driver after each this many
    steps, so that a restart goes on from there; null: don't. Cheaper than a checkpoint, and gone
    with the driver's machine. Without workers (the inline engine) there is nothing to copy for."""
    keep: PositiveInt = 2
    """Newest checkpoints kept on disk."""
    max_failures: NonNegativeInt | None = 5
    """Checkpoints in a row that may fail (disk full, storage away) while training goes on, each
    told at once. null: any number. The last one of a run must succeed."""


class Log(Section):
    """How often training reports."""

    every_steps: PositiveInt = 10
    """Steps between two lines of metrics, each of which costs one all-reduce of the sums."""


class Input(Section):
    """How training images are read and decoded."""

    decoder: DecoderName = "auto"
    """`cpu`: simplejpeg and OpenCV; `dali_cpu`, `dali_gpu`: NVIDIA DALI; `synthetic`: noise without
    reading, to see how fast all else is; `auto`: by the worker's hardware."""
    window_blocks: PositiveInt = 64
    """Blocks of rows that are mixed with each other when the order is shuffled."""
    decoders: PositiveInt | None = None
    """Parallel decode tasks of a worker; null: by the number of cores."""
    ahead_batches: PositiveInt = 4
    """Finished batches that a worker holds ahead."""
    audit: bool = False
    """Whether the rows that each step really used are written to `audit/`."""
    cache: CacheKind | None = None
    """Where each machine keeps the blocks that it has read, for this run and later ones: `disk`,
    `ram` (shared memory, until its folder is removed or the machine restarts) or `none`; null:
    `disk` for a ShardSet in an object store, `none` for a local folder."""
    cache_dir: str | None = None
    """Folder of the cache; null: `~/.cache/raytrain/blocks`, for `ram` one in `/dev/shm`."""
    cache_gb: PositiveFloat | None = None
    """Most that the cache holds, in GB (1e9 bytes); null: half of the space that is free there,
    for `ram` a quarter."""
    damaged: DamageRule = "stop"
    """What follows when a block is still damaged after it was read again: `stop` the run, or
    `skip` the damaged copy and read the same images from another prepared size, so that no step
    loses an image; where no size has them whole, the run stops."""


class Faults(Section):
    """What happens when workers die."""

    elastic: ElasticMode = "restart"
    """`restart`: when a worker is lost, all start again from the newest checkpoint. `step`: only
    the step under way is made again, by those left (torchft); a new worker takes the lost one's
    place as they go on."""
    max_restarts: NonNegativeInt = 3
    """Restarts from the newest checkpoint before the run gives up."""
    standby: bool = False
    """`elastic: restart`: whether as many workers again wait, started and with all imported, to go
    on from the newest checkpoint at once when some are lost. They take slots (GPUs, where workers
    have them) and memory of their own."""
    hang_s: PositiveFloat = 20.0
    """`elastic: step`: seconds that workers wait in a step for one that doesn't move before they go
    on without it; it must be longer than any step. In both modes a worker that doesn't answer for
    three times that is killed and replaced."""
    wait_s: PositiveFloat = 600.0
    """Seconds that a run waits for machines for the fewest workers that it needs, before it gives
    up."""


class Resize(Section):
    """When a run with `--workers MIN:MAX` takes in machines that have joined. It does so once the
    time that it saves is worth the restart, which is measured in each run."""

    min_gain: NonNegativeFloat = 2.0
    """Seconds that more workers must save (as if twice as many were twice as fast) for each second
    of the restart."""
    settle_s: NonNegativeFloat = 5.0
    """Seconds without a further change before machines that have joined are taken in, so that
    several cost one restart."""
    rest_s: NonNegativeFloat = 60.0
    """Seconds that a group runs at least before it is restarted for more workers."""


class Recipe(Section):
    """A whole recipe; the README shows it as YAML."""

    model: Model
    """Which network is trained."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Decides weights at the start, the order of images, and their crops."""
    phases: Annotated[tuple[Phase, ...], Field(strict=False), AfterValidator(_check_not_empty)]
    """What is trained in turn, at least one."""
    schedule: Schedule
    """Learning rate, momentum and weight decay over the epochs."""
    optimizer: Optimizer = Optimizer()
    """How gradients change the parameters."""
    loss: Loss = Loss()
    """What is minimized."""
    augment: Augment = Augment()
    """How training images are varied."""
    normalize: Normalize = Normalize()
    """How pixels become the network's input."""
    precision: Precision = Precision()
    """In which numbers the network computes."""
    compile: bool = False
    """Whether torch.compile makes a faster program of the network for each image size, before the
    first step; that takes about a minute a size, and the training clock runs."""
    ema: Ema = Ema()
    """An average of the weights."""
    memory: Memory = Memory()
    """How much a worker computes at once."""
    validation: Validation = Validation()
    """When, where and how the model is validated."""
    target: Target = Target()
    """When training may stop."""
    checkpoint: Checkpoint = Checkpoint()
    """When the state of training is saved."""
    log: Log = Log()
    """How often training reports."""
    input: Input = Input()
    """How training images are read."""
    faults: Faults = Faults()
    """What happens when workers die."""
    resize: Resize = Resize()
    """When machines that have joined are taken in."""

    @property
    def num_epochs(self) -> int:
        """Epochs of the whole run."""
        return sum(phase.epochs for phase in self.phases)

    @model_validator(mode="after")
    def _steps_are_elastic_without_compile(self) -> Self:
        if self.compile and self.faults.elastic == "step":
            raise ValueError(
                "compile: true compiles anew for each number of workers, which faults.elastic: "
                "step changes at any step; leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _restarts_are_not_steps(self) -> Self:
        asked = {
            "faults.standby": self.faults.standby,
            "checkpoint.memory_steps": self.checkpoint.memory_steps is not None,
        }
        for name, given in asked.items():
            if given and self.faults.elastic == "step":
                raise ValueError(
                    f"{name} is for faults.elastic: restart; with step the others go on when a "
                    "worker is lost; leave one of them out"
                )
        return self

    @model_validator(mode="after")
    def _check_curves(self) -> Self:
        """Curves must fill the run exactly, which only the whole recipe can tell."""
        faults: list[InitErrorDetails] = []
        for name, below in (("lr", math.inf), ("momentum", 1.0), ("weight_decay", math.inf)):
            curve: Curve = getattr(self.schedule, name)
            try:
                curve.check_values(0.0, below)
                curve.resolve(self.num_epochs)
            except CurveError as error:
                problem = PydanticCustomError("curve", "{problem}", {"problem": str(error)})
                loc = ("schedule", name, *error.where)
                faults.append(InitErrorDetails(type=problem, loc=loc, input=curve))
        if faults:
            raise ValidationError.from_exception_data("Recipe", faults)
        return self
