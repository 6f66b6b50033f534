"""A regression that explains what a run's time went to: so much per step, per row, per token, per block.

The model of a run's seconds is linear in what the run did (:data:`TERMS`), with coefficients >= 0, fitted to relative
errors. A prediction is only worth something for runs that were not fitted: the study predicts the runs of each setting
with the coefficients of all the other settings (:func:`minillm.bench.stress_analysis.fit_cost`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

TERMS = ("steps", "prefill_steps", "decode_rows", "prefill_tokens", "swaps", "swapped_blocks")
"""Counts of a run that cost time.

`steps`: calls of the model; `prefill_steps`: those with a prefill chunk among their tokens, which take the form of the
products for many rows; `decode_rows`, `prefill_tokens`: tokens computed either way, recomputed ones included; `swaps`:
requests copied out or in; `swapped_blocks`: blocks copied, both ways.
"""

Counts = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds per unit of each term; a term that is missing costs nothing."""

    seconds: Mapping[str, float]

    def predict(self, counts: Counts) -> float:
        """Seconds of a run with these counts."""
        return sum(cost * float(counts[term]) for term, cost in self.seconds.items())

    def parts(self, counts: Counts) -> dict[str, float]:
        """The same, term by term."""
        return {term: cost * float(counts[term]) for term, cost in self.seconds.items()}


def fit(runs: Sequence[Counts], seconds: Sequence[float], terms: Sequence[str] = TERMS) -> StepCost:
    """Least squares of relative errors with coefficients >= 0.

    Where coefficients come out negative, the most negative one (by its share of the runs' times) is set to 0 and the
    rest is fitted again. A term that no run has is left at 0.
    """
    import numpy as np

    if not runs or len(runs) != len(seconds):
        raise ValueError(f"{len(runs)} runs and {len(seconds)} times cannot be fitted")
    target = np.asarray(seconds, dtype=float)
    if not (target > 0).all():
        raise ValueError("times must be above 0")
    table = np.asarray([[float(run[term]) for term in terms] for run in runs]) / target[:, None]
    kept = [index for index in range(len(terms)) if table[:, index].any()]
    solution = np.zeros(0)
    while kept:
        scale = np.abs(table[:, kept]).max(axis=0)
        solution = np.linalg.lstsq(table[:, kept] / scale, np.ones(len(runs)), rcond=None)[0] / scale
        worst = int(np.argmin(solution * scale))
        if solution[worst] >= 0:
            break
        del kept[worst]
    costs = dict.fromkeys(terms, 0.0)
    costs.update({terms[index]: float(cost) for index, cost in zip(kept, solution, strict=True)})
    return StepCost(costs)
