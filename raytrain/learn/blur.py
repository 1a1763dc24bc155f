"""BlurPool: a low-pass filter before images are made smaller."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

_FEWEST_CHANNELS = 16  # the stem sees the pixels themselves and stays sharp, as in FFCV's recipes


def blur(x: Tensor) -> Tensor:
    """The filter [1, 2, 1]/4 along height and width, zero outside; shape (n, c, h, w) as given.

    Two running means of two make it, which needs no weights and follows x's dtype and layout.
    """
    return functional.avg_pool2d(functional.avg_pool2d(x, 2, 1, padding=1), 2, 1)


def blur_before_strides(model: nn.Module) -> int:
    """Blur the input of each strided convolution of at least 16 channels; returns how many.

    After Zhang 2019 (https://arxiv.org/abs/1904.11486), who convolves at full size and then takes
    every second value of the blurred result. Both are linear, so blurring first and convolving
    with a stride gives the same, but for the border, in a quarter of the time. Names of weights
    stay as they are.
    """
    found = 0
    for module in model.modules():
        if not isinstance(module, nn.Conv2d):
            continue
        if max(module.stride) > 1 and module.in_channels >= _FEWEST_CHANNELS:
            module.register_forward_pre_hook(_blur_input)
            found += 1
    return found


def _blur_input(_module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (blur(inputs[0]), *inputs[1:])
