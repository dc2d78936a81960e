"""Least squares whose coefficients are costs: none may be negative."""

from itertools import combinations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
NUM_ROUNDS = 8
#: Points further from the fit than this many typical residuals weigh less: a machine that was busy elsewhere for a while.
HUBER = 2.0
#: Columns that say almost the same are not told apart; the later one is left out.
MOST_CONDITION = 1e8


def fit(columns: Array, measured: Array) -> Array:
    """Coefficients, [columns], that make `columns` @ coefficients nearest to `measured` [rows], relative to the fitted values.

    Exact over all choices of which coefficients are zero, so for few columns only. Outliers weigh less, by Huber's rule: relative to what was
    fitted, so that a few values near nothing (two messages that were read at once) do not pull everything down to them."""
    scale = np.full(len(measured), max(float(np.median(measured)), 1e-12))
    weights = np.ones(len(measured))
    found = np.zeros(columns.shape[1])
    for _ in range(NUM_ROUNDS):
        found = _solve(columns / scale[:, None], measured / scale, weights)
        fitted = columns @ found
        scale = np.maximum(fitted, 1e-3 * float(np.median(fitted)) + 1e-15)
        residuals = np.abs(measured / scale - 1)
        limit = HUBER * max(1.4826 * float(np.median(residuals)), 1e-9)
        weights = np.minimum(1.0, limit / np.maximum(residuals, 1e-12))
    return found


def _solve(rows: Array, goals: Array, weights: Array) -> Array:
    scale = np.sqrt((rows**2).mean(0))
    usable = [column for column in range(rows.shape[1]) if scale[column] > 0]
    scaled = rows[:, usable] / scale[usable]
    products, goal = scaled.T @ (weights[:, None] * scaled), scaled.T @ (weights * goals)
    best, best_cost = np.zeros(len(usable)), 0.0
    for size in range(1, len(usable) + 1):
        for chosen in combinations(range(len(usable)), size):
            part = products[np.ix_(chosen, chosen)]
            if np.linalg.cond(part) > MOST_CONDITION:
                continue
            values = np.linalg.solve(part, goal[list(chosen)])
            # The residual's square sum but for a constant.
            cost = -float(goal[list(chosen)] @ values)
            if (values >= 0).all() and cost < best_cost - 1e-12:
                best, best_cost = np.zeros(len(usable)), cost
                best[list(chosen)] = values
    found = np.zeros(rows.shape[1])
    found[usable] = best / scale[usable]
    return found
