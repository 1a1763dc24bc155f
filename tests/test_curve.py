"""Curves: exact ends, values between the ends, and what can't be a curve."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from raytrain.recipe.curve import SHAPES, Curve, CurveError

positive = st.floats(1e-6, 1e3)


@st.composite
def curves(draw: st.DrawFn) -> tuple[Curve, int]:
    """Draw a curve that fits a run, and the run's epochs."""
    num_epochs = draw(st.integers(1, 100))
    percents = sorted(draw(st.sets(st.integers(1, 99), max_size=4)))
    pieces: list[dict[str, object]] = []
    for until in [*(f"{percent}%" for percent in percents), "end"]:
        shape = draw(st.sampled_from(SHAPES))
        value = draw(positive) if shape == "constant" else [draw(positive), draw(positive)]
        pieces.append({"until": until, shape: value})
    return Curve.model_validate(pieces), num_epochs


@given(curves())
def test_spans_meet_and_cover_the_run(drawn: tuple[Curve, int]) -> None:
    curve, num_epochs = drawn
    spans = curve.resolve(num_epochs).spans
    assert spans[0].begin == 0
    assert spans[-1].end == num_epochs
    assert all(a.end == b.begin for a, b in itertools.pairwise(spans))


@given(curves())
def test_values_at_the_ends_of_pieces_are_exact(drawn: tuple[Curve, int]) -> None:
    curve, num_epochs = drawn
    resolved = curve.resolve(num_epochs)
    for span in resolved.spans:
        assert resolved.at(span.begin) == span.first
        assert span.at(span.end) == span.last
    assert resolved.at(num_epochs) == resolved.spans[-1].last


@given(curves(), st.lists(st.floats(0, 1), min_size=2, max_size=2).map(sorted))
def test_a_piece_goes_only_one_way_and_stays_between_its_ends(
    drawn: tuple[Curve, int], shares: list[float]
) -> None:
    curve, num_epochs = drawn
    for span in curve.resolve(num_epochs).spans:
        early, late = (span.at(span.begin + t * (span.end - span.begin)) for t in shares)
        rounding = 1e-12 * max(span.first, span.last)
        low, high = sorted((span.first, span.last))
        assert low - rounding <= early <= high + rounding
        assert (late - early) * (span.last - span.first) >= -rounding * (high - low)


@given(curves())
def test_a_curve_survives_its_own_yaml_form(drawn: tuple[Curve, int]) -> None:
    curve, _ = drawn
    assert Curve.model_validate(curve.model_dump(mode="json")) == curve


@pytest.mark.parametrize(
    ("shape", "middle", "quarter"),
    [
        ("linear", 4.5, 6.25),
        ("cosine", 4.5, 1 + 7 * (1 + math.cos(math.pi / 4)) / 2),
        ("exponential", math.sqrt(8), 8**0.75),
    ],
)
def test_shapes_follow_their_formulae(shape: str, middle: float, quarter: float) -> None:
    curve = Curve.model_validate([{"until": "end", shape: [8, 1]}])
    assert curve.at(5, 10) == pytest.approx(middle, rel=1e-12)
    assert curve.at(2.5, 10) == pytest.approx(quarter, rel=1e-12)


def test_until_may_be_epochs_a_share_or_the_end() -> None:
    curve = Curve.model_validate(
        [
            {"until": 2, "constant": 1.0},
            {"until": "50%", "constant": 2.0},
            {"until": "end", "constant": 3.0},
        ]
    )
    assert [span.end for span in curve.resolve(20).spans] == [2, 10, 20]
    assert [curve.at(epoch, 20) for epoch in (0, 1.99, 2, 9.99, 10, 20)] == [1, 1, 2, 2, 3, 3]


def test_a_number_is_a_constant_curve_and_is_written_as_one() -> None:
    curve = Curve.model_validate(1)
    assert curve == Curve.constant(1.0)
    assert curve.at(0, 3) == curve.at(3, 3) == 1.0
    assert curve.model_dump() == 1.0


@pytest.mark.parametrize("epoch", [-0.1, 10.1, math.nan])
def test_outside_of_the_run_there_is_no_value(epoch: float) -> None:
    with pytest.raises(ValueError, match="outside the run"):
        Curve.constant(1.0).at(epoch, 10)


@pytest.mark.parametrize(
    ("pieces", "where", "problem"),
    [
        ([{"until": 8, "constant": 1.0}], (0, "until"), "ends at epoch 8 but the run has 10"),
        ([{"until": 12, "constant": 1.0}], (0, "until"), "to epoch 12 but the run has 10"),
        (
            [{"until": "60%", "constant": 1.0}, {"until": 6, "constant": 1.0}],
            (1, "until"),
            r"epoch 6, which is not after the piece before it \(epoch 6\)",
        ),
        (
            [{"until": "end", "constant": 1.0}, {"until": "end", "constant": 1.0}],
            (1, "until"),
            "not after the piece before",
        ),
    ],
)
def test_pieces_must_follow_each_other_up_to_the_end(
    pieces: list[object], where: tuple[object, ...], problem: str
) -> None:
    with pytest.raises(CurveError, match=problem) as caught:
        Curve.model_validate(pieces).resolve(10)
    assert caught.value.where == where


@pytest.mark.parametrize(
    "bad",
    [
        "fast",
        True,
        None,
        [],
        [{"until": "end"}],
        [{"until": "end", "linear": [0.0, 1.0], "cosine": [0.0, 1.0]}],
        [{"until": "end", "exponential": [1.0, 0.0]}],
        [{"until": "end", "linear": [0.0, 1.0, 2.0]}],
        [{"until": "end", "linear": [0.0, "1"]}],
        [{"until": "end", "constant": math.inf}],
        [{"until": "end", "sine": [0.0, 1.0]}],
        [{"until": "0%", "constant": 1.0}],
        [{"until": "101%", "constant": 1.0}],
        [{"until": "nan%", "constant": 1.0}],
        [{"until": -1, "constant": 1.0}],
        [{"until": True, "constant": 1.0}],
        [{"until": "soon", "constant": 1.0}],
    ],
)
def test_what_is_no_curve_is_refused(bad: object) -> None:
    with pytest.raises(ValidationError):
        Curve.model_validate(bad)


def test_values_out_of_range_are_pointed_at() -> None:
    curve = Curve.model_validate([{"until": "end", "linear": [0.5, 1.0]}])
    curve.check_values(0.0)
    with pytest.raises(CurveError, match="must be >= 0 and < 1, is 1") as caught:
        curve.check_values(0.0, below=1.0)
    assert caught.value.where == (0, "linear", 1)
