"""Piecewise curves over epochs: how lr, momentum and weight decay move during a run."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    Field,
    PlainValidator,
    RootModel,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from raytrain.errors import RaytrainError

Shape = Literal["constant", "linear", "cosine", "linear_cosine", "exponential"]
SHAPES: tuple[Shape, ...] = ("constant", "linear", "cosine", "linear_cosine", "exponential")
Pair = Annotated[tuple[float, float], Field(strict=False)]  # strict=False: YAML has lists


class CurveError(RaytrainError):
    """A curve that can't be used. `where` is the path of keys to the fault inside the curve."""

    def __init__(self, where: tuple[int | str, ...], problem: str) -> None:
        super().__init__(problem)
        self.where = where


def _until(value: object) -> float | str:
    """Check the end of a piece: epochs > 0, 'NN%' of the run, or 'end'."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if 0 < value < math.inf:
            return value
    elif value == "end":
        return "end"
    elif isinstance(value, str) and value.endswith("%"):
        try:
            percent = float(value[:-1])
        except ValueError:
            percent = math.nan
        if 0 < percent <= 100:
            return value
    raise ValueError("must be a number of epochs > 0, a share of the run such as 10%, or end")


class Piece(BaseModel, frozen=True, strict=True, extra="forbid", allow_inf_nan=False):
    """One piece of a curve: where it ends and exactly one of the shapes.

    With t the share of the piece already done, 0 at its begin and 1 at its end, and [a, b] the
    values there:

    - constant c: c
    - linear [a, b]: a + (b - a) t
    - cosine [a, b]: b + (a - b) (1 + cos(pi t)) / 2
    - linear_cosine [a, b]: b + (a - b) (1 - t) (1 + cos(pi t)) / 2
      (Bello et al. 2017, https://arxiv.org/abs/1709.07417, section 4.3)
    - exponential [a, b]: a (b / a)^t, with a and b > 0
    """

    until: Annotated[int | float | str, PlainValidator(_until)]
    """Where the piece ends: epochs from the start of the run, 'NN%' of the run, or 'end'."""
    constant: float | None = None
    """The value all along the piece."""
    linear: Pair | None = None
    """Values at the begin and the end of a straight line."""
    cosine: Pair | None = None
    """Values at the begin and the end of half a cosine wave, flat at both."""
    linear_cosine: Pair | None = None
    """Values at the begin and the end of a line times half a cosine wave: falls off faster than
    either, and ends flat."""
    exponential: Pair | None = None
    """Values at the begin and the end, both > 0; equal ratios in equal times."""

    @model_validator(mode="after")
    def _has_one_shape(self) -> Self:
        given = [shape for shape in SHAPES if getattr(self, shape) is not None]
        if len(given) != 1:
            raise ValueError(
                f"needs exactly one of {', '.join(SHAPES)}; has {' and '.join(given) or 'none'}"
            )
        if self.exponential is not None and min(self.exponential) <= 0:
            raise ValueError(
                f"an exponential piece needs both values > 0, has {list(self.exponential)}"
            )
        return self

    @model_serializer(mode="wrap")
    def _without_unused_shapes(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in handler(self).items() if value is not None}

    @property
    def shape(self) -> Shape:
        """Which of the shapes the piece has."""
        return next(shape for shape in SHAPES if getattr(self, shape) is not None)

    @property
    def values(self) -> tuple[float, float]:
        """The values at the begin and at the end of the piece."""
        if self.constant is not None:
            return self.constant, self.constant
        pair: tuple[float, float] = getattr(self, self.shape)
        return pair

    def end(self, num_epochs: int) -> float:
        """Return where the piece ends, in epochs, in a run of `num_epochs`."""
        if isinstance(self.until, str):
            if self.until == "end":
                return float(num_epochs)
            return float(self.until[:-1]) * num_epochs / 100
        return float(self.until)


@dataclass(frozen=True, slots=True)
class Span:
    """A piece placed in a run: from epoch `begin` to `end`, from value `first` to `last`."""

    begin: float
    end: float
    shape: Shape
    first: float
    last: float

    def at(self, epoch: float) -> float:
        """Return the value at `epoch`: `first` and `last` are met exactly, not to rounding."""
        t = (epoch - self.begin) / (self.end - self.begin)
        if t <= 0 or self.first == self.last:
            return self.first
        if t >= 1:
            return self.last
        match self.shape:
            case "cosine":
                return self.last + (self.first - self.last) * (1 + math.cos(math.pi * t)) / 2
            case "linear_cosine":
                fall = (1 - t) * (1 + math.cos(math.pi * t)) / 2
                return self.last + (self.first - self.last) * fall
            case "exponential":
                return self.first * math.pow(self.last / self.first, t)
            case _:
                return self.first + (self.last - self.first) * t


@dataclass(frozen=True, slots=True)
class ResolvedCurve:
    """A curve placed in a run: spans that meet and cover the run from epoch 0 to its end."""

    spans: tuple[Span, ...]

    def at(self, epoch: float) -> float:
        """Return the value at `epoch` (0 to the run's end); where two pieces meet, the later's."""
        if not 0 <= epoch <= self.spans[-1].end:
            raise ValueError(f"epoch {epoch} is outside the run's 0 to {self.spans[-1].end:g}")
        number = bisect_right(self.spans, epoch, key=lambda span: span.end)
        return self.spans[min(number, len(self.spans) - 1)].at(epoch)


class Curve(RootModel[tuple[Piece, ...]], frozen=True):
    """A number over the epochs of a run, as pieces that follow each other.

    In YAML it is a number (constant) or a list of pieces, such as
    `[{until: 10%, linear: [0.05, 8.5]}, {until: end, cosine: [8.5, 0.05]}]`.
    """

    @classmethod
    def constant(cls, value: float) -> Curve:
        """Return the curve that is `value` all along."""
        return cls((Piece(until="end", constant=value),))

    @model_validator(mode="before")
    @classmethod
    def _from_number(cls, data: object) -> object:
        if isinstance(data, (int, float)) and not isinstance(data, bool):
            return ({"until": "end", "constant": data},)
        if not isinstance(data, (list, tuple)) or not data:
            raise ValueError(
                "must be a number or a list of pieces such as {until: end, cosine: [0.1, 0.0]}"
            )
        return tuple(data)

    @model_serializer(mode="wrap")
    def _to_number(self, handler: SerializerFunctionWrapHandler) -> Any:
        only = self.root[0]
        if len(self.root) == 1 and only.until == "end" and only.constant is not None:
            return only.constant
        return handler(self)

    def check_values(self, low: float, below: float = math.inf) -> None:
        """Raise CurveError unless each piece's values are in [low, below)."""
        for number, piece in enumerate(self.root):
            for side, value in enumerate(piece.values):
                if not low <= value < below:
                    limit = f">= {low:g}" + (f" and < {below:g}" if below < math.inf else "")
                    where = (number, piece.shape, *(() if piece.shape == "constant" else (side,)))
                    raise CurveError(where, f"must be {limit}, is {value:g}")

    def resolve(self, num_epochs: int) -> ResolvedCurve:
        """Place the curve in a run of `num_epochs` >= 1.

        Raises CurveError where the pieces don't follow each other or don't end with the run.
        """
        spans: list[Span] = []
        begin = 0.0
        for number, piece in enumerate(self.root):
            end, where = piece.end(num_epochs), (number, "until")
            run = f"the run has {num_epochs} epochs"
            if end > num_epochs:
                raise CurveError(
                    where,
                    f"the curve goes on to epoch {end:.12g} but {run}; use `until: end` or a share "
                    "such as 10%",
                )
            if end <= begin:
                raise CurveError(
                    where,
                    f"ends at epoch {end:.12g}, which is not after the piece before it (epoch "
                    f"{begin:.12g}); pieces must follow each other",
                )
            if number == len(self.root) - 1 and end != num_epochs:
                raise CurveError(
                    where,
                    f"the curve ends at epoch {end:.12g} but {run}; use `until: end` for the last "
                    "piece",
                )
            spans.append(Span(begin, end, piece.shape, *piece.values))
            begin = end
        return ResolvedCurve(tuple(spans))

    def at(self, epoch: float, num_epochs: int) -> float:
        """Return the value at `epoch` in a run of `num_epochs`; to read many, resolve once."""
        return self.resolve(num_epochs).at(epoch)
