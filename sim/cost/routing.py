"""How tokens spread over experts when every token chooses for itself.

Experts are not equally popular: popularity is taken as log-normal with `SPREAD`. Few tokens touch
fewer experts than an even deal would (less to read), and one rank of an expert-parallel group gets
more than its share.
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from sim.cost.operators.base import Array

SPREAD = 0.5
"""Standard deviation of the logarithm of an expert's popularity. Deployments of Mixtral at batch 10
and of Llama 4 Scout at 11 and 34 are 5 to 10 % too fast or too slow without it."""


def popularity(experts: int, topk: int, spread: float = SPREAD) -> Array:
    """Probability that one token chooses each expert; sums to about `topk`."""
    normal = NormalDist()
    rank = np.array([normal.inv_cdf((i + 0.5) / experts) for i in range(experts)])
    weight = np.exp(spread * rank)
    chosen: Array = np.minimum(1.0, topk * weight / weight.sum())
    return chosen


def touched_experts(tokens: Array, experts: int, topk: int, spread: float = SPREAD) -> Array:
    """Expected number of distinct experts that so many tokens choose."""
    missed = (1 - popularity(experts, topk, spread)) ** np.asarray(tokens)[..., None]
    touched: Array = experts - missed.sum(axis=-1)
    return touched


def busiest_rank(experts: int, ranks: int, spread: float = SPREAD) -> float:
    """Load of the busiest of `ranks` groups of experts over the mean load."""
    if ranks == 1:
        return 1.0
    # The largest of so many normal deviates, on average (Blom); groups are sums of popularities.
    largest = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
    of_mean = float(np.sqrt(np.exp(spread**2) - 1))
    return 1 + largest * of_mean * float(np.sqrt(ranks / experts))
