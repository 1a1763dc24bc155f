"""Models by name, and small ones for small images.

A name is one of those here (``small_cnn``), one of torchvision's (``resnet50``), one of timm's
(``timm:resnet50d``), or a function of the user's (``module:function``), called as
``function(num_classes=..., **args)``.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from raytrain.errors import RaytrainError
from raytrain.recipe.types import Model

ModelMaker = Callable[..., nn.Module]


def build_model(spec: Model, num_classes: int) -> nn.Module:
    """The model that a recipe names, with ``num_classes`` outputs and fresh weights.

    Raises:
        RaytrainError: no such model, or it doesn't take the given arguments.
    """
    make = _maker(spec.name)
    try:
        model = make(num_classes=num_classes, **spec.args)
    except TypeError as error:
        raise RaytrainError(
            f"model.args: {spec.name} can't be called with num_classes"
            f"{''.join(f', {name}' for name in spec.args)}: {error}"
        ) from error
    if not isinstance(model, nn.Module):
        raise RaytrainError(
            f"model.name: {spec.name} returned {type(model).__name__}, not a torch.nn.Module"
        )
    return model


def check_model(spec: Model) -> None:
    """Raise RaytrainError where a recipe's model doesn't exist; builds nothing."""
    _maker(spec.name)


def _maker(name: str) -> ModelMaker:
    source, _, rest = name.rpartition(":")
    if source == "timm":
        return _timm_maker(rest)
    if source:
        return _user_maker(source, rest)
    if name in OWN:
        return OWN[name]
    from torchvision.models import get_model_builder, list_models  # noqa: PLC0415 (slow to import)

    if name not in list_models():
        raise RaytrainError(_unknown("model.name", name, [*OWN, *list_models()], "torchvision"))
    builder: ModelMaker = get_model_builder(name)
    return builder


def _timm_maker(name: str) -> ModelMaker:
    try:
        import timm  # noqa: PLC0415 (an extra)
    except ImportError as error:
        raise RaytrainError(
            f"model.name: timm:{name} needs timm: pip install 'raytrain[timm]'"
        ) from error
    if not timm.is_model(name):
        raise RaytrainError(_unknown("model.name", name, timm.list_models(), "timm"))
    return lambda **args: timm.create_model(name, pretrained=False, **args)


def _user_maker(module_name: str, function: str) -> ModelMaker:
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise RaytrainError(
            f"model.name: can't import {module_name}: {error}; "
            "run raytrain where that module can be imported"
        ) from error
    if not callable(make := getattr(module, function, None)):
        names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise RaytrainError(_unknown("model.name", function, names, module_name))
    return make  # type: ignore[no-any-return]


def _unknown(key: str, name: str, names: list[str], where: str) -> str:
    close = difflib.get_close_matches(name, names, n=3)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    return f"{key}: {where} has no model {name!r}{hint}"


def small_cnn(num_classes: int, width: int = 32) -> nn.Module:
    """Three 3x3 convolutions with BatchNorm and global pooling: for digits and first tries.

    Takes (n, 3, s, s) for any s of at least 8; gives (n, num_classes).
    """
    layers: list[nn.Module] = []
    channels = 3
    for out in (width, 2 * width, 4 * width):
        layers += [_conv_norm(channels, out), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
        channels = out
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes)]
    return nn.Sequential(*layers, *head)


def small_resnet(num_classes: int, width: int = 32, zero_init_residual: bool = False) -> nn.Module:
    """A residual net for images of 24 to 96 px: three stages at 1/2, 1/4 and 1/8 of their side.

    Each stage is a strided convolution and one basic block (He et al. 2015, section 4.2).
    Takes (n, 3, s, s); gives (n, num_classes). 0.49 million parameters at width 32. With
    ``zero_init_residual`` each block starts as the identity (Goyal et al. 2017, section 5.1).
    """
    stages: list[nn.Module] = []
    channels = 3
    for out in (width, 2 * width, 4 * width):
        strided = _conv_norm(channels, out, stride=2)
        stages += [strided, nn.ReLU(inplace=True), _Residual(out, zero_init_residual)]
        channels = out
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes)]
    return nn.Sequential(*stages, *head)


def whitened_cnn(num_classes: int, width: int = 32) -> nn.Module:
    """A plain net for few epochs on images of 16 to 48 px: whitened pixels, then three blocks.

    After Jordan 2024 (https://arxiv.org/abs/2404.00498), at half the width of the smallest net
    there: fixed 2x2 filters that whiten the pixels, each with both signs; blocks of two 3x3
    convolutions with max-pooling between them, of ``width``, 4 and 4 times ``width`` channels; the
    largest value of each channel; a linear layer without bias, its output divided by 9. There the
    filters come from the training images, here they need none: natural images look alike at
    every scale, so that edges and sums of neighbouring pixels (Haar's filters) in opponent colours
    (Ruderman et al. 1998) are all but uncorrelated, and BatchNorm makes their variances equal.
    SiLU for GELU, which costs a CPU a fifth more of the step.

    Takes (n, 3, s, s) for any s of at least 9; gives (n, num_classes). 0.50 million parameters at
    width 32.
    """
    stages: list[nn.Module] = [_Whitening(), nn.SiLU(inplace=True)]
    channels = 24
    for out in (width, 4 * width, 4 * width):
        pooled = nn.Conv2d(channels, out, 3, padding=1, bias=False)
        stages += [pooled, nn.MaxPool2d(2), nn.BatchNorm2d(out), nn.SiLU(inplace=True)]
        stages += [_conv_norm(out, out), nn.SiLU(inplace=True)]
        channels = out
    return nn.Sequential(
        *stages, nn.AdaptiveMaxPool2d(1), nn.Flatten(), _Scores(channels, num_classes)
    )


class _Whitening(nn.Module):
    """Haar's four 2x2 filters in three colours, with both signs.

    Takes (n, 3, s, s); gives (n, 24, s - 1, s - 1).
    """

    def __init__(self) -> None:
        super().__init__()
        haar = torch.tensor(
            [[[1, 1], [1, 1]], [[1, -1], [1, -1]], [[1, 1], [-1, -1]], [[1, -1], [-1, 1]]]
        )
        colours = functional.normalize(torch.tensor([[1.0, 1, 1], [1, 0, -1], [1, -2, 1]]))
        filters = torch.einsum("ca,fhw->cfahw", colours, haar / 2).reshape(12, 3, 2, 2)
        self.filters: Tensor
        self.register_buffer("filters", filters)
        self.norm = nn.BatchNorm2d(12, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(functional.conv2d(x, self.filters))
        return torch.cat((x, -x), dim=1)


class _Scores(nn.Linear):
    """A linear layer whose output starts small, as of an uncertain classifier."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 9


class _Residual(nn.Module):
    def __init__(self, channels: int, zero_init: bool) -> None:
        super().__init__()
        self.first = _conv_norm(channels, channels)
        self.second = _conv_norm(channels, channels)
        if zero_init:
            nn.init.zeros_(self.second.get_parameter("1.weight"))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.second(torch.relu(self.first(x))))


def _conv_norm(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


OWN: dict[str, ModelMaker] = {
    "small_cnn": small_cnn,
    "small_resnet": small_resnet,
    "whitened_cnn": whitened_cnn,
}
