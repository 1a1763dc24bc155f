"""How much each drawn value decides, as far as so few trials can tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raytrain.tuning.rungs import Rungs
from raytrain.tuning.trials import Trial

_BINS = 3  # of a number's range, by equal counts: a curve with one peak shows too
_FEWEST = 6  # trials to say anything of
_SHUFFLES = 500
_LEVEL = 95  # percent of the shuffles that `by_chance` isn't below


@dataclass(frozen=True)
class Importance:
    """How much one drawn value decides.

    Attributes:
        name: of the value.
        share: of the variance of the trials' ranks, 0..1, that is between groups of like values
            (the correlation ratio eta squared).
        by_chance: the share that 95 % of random orders of the same trials stay below.
        trials: that have the value.
    """

    name: str
    share: float
    by_chance: float
    trials: int


def importances(trials: Sequence[Trial], rungs: Rungs) -> list[Importance]:
    """The importance of each value, the greatest first.

    Trials are ranked by how many rungs they came to and then by top-1, broken ones last, so that
    those that were stopped count too.

    Args:
        trials: of a sweep.
        rungs: where they were compared.
    """
    known = [t for t in trials if t.rows or t.is_broken]
    order = sorted(known, key=lambda t: (not t.is_broken, rungs.reached(t.samples), t.best_top1))
    rank_of = {t.number: float(rank) for rank, t in enumerate(order)}
    found: list[Importance] = []
    for name in dict.fromkeys(name for t in known for name in t.values):
        having = [t for t in known if name in t.values]
        values = [t.values[name] for t in having]
        if len(having) < _FEWEST or len({repr(v) for v in values}) < 2:
            continue
        groups = _groups(values)
        ranks = np.array([rank_of[t.number] for t in having])
        random = np.random.default_rng(0)
        shuffled = [_eta_squared(groups, random.permutation(ranks)) for _ in range(_SHUFFLES)]
        chance = float(np.percentile(shuffled, _LEVEL))
        found.append(Importance(name, _eta_squared(groups, ranks), chance, len(having)))
    return sorted(found, key=lambda i: -i.share)


def _groups(values: Sequence[Any]) -> NDArray[np.int64]:
    """A number for each value, the same for like values."""
    distinct = {repr(value) for value in values}
    if len(distinct) > _BINS and all(isinstance(v, int | float) for v in values):
        edges = np.quantile(np.array(values, float), np.arange(1, _BINS) / _BINS)
        return np.searchsorted(edges, np.array(values, float), side="right")
    names = sorted(distinct)
    return np.array([names.index(repr(value)) for value in values])


def _eta_squared(groups: NDArray[np.int64], ranks: NDArray[np.float64]) -> float:
    mean = ranks.mean()
    total = float(((ranks - mean) ** 2).sum())
    between = sum(
        float((groups == g).sum() * (ranks[groups == g].mean() - mean) ** 2)
        for g in np.unique(groups)
    )
    return between / total if total else 0.0
