"""What FP8 costs and saves: GPU time as a function of shapes, with the constants that were measured.

FP8 saves time in the GEMMs and spends some on casts, so a layer needs enough tokens and enough width to win.
"""

from __future__ import annotations

from typing import NamedTuple

ASSUMED_TOKENS = 8192


class Cost(NamedTuple):
    """GPU time of one weight's forward and backward: FLOPs / rate + cast elements * bytes / bandwidth + overhead."""

    rate: float  # FLOP/s
    cast_bytes: float  # per element of x, w and dy, at BANDWIDTH
    overhead: float  # seconds

    def seconds(self, rows: int, columns: int, tokens: int, experts: int = 1) -> float:
        """Of a (rows, columns) weight, or of one for each expert, among which `tokens` rows are divided."""
        elements = tokens * (rows + columns) + experts * rows * columns
        return (
            6.0 * tokens * rows * columns / self.rate + self.cast_bytes * elements / BANDWIDTH + self.overhead
        )


# Fitted by examples/benchmark_linear.py on an H200 (torch 2.11), 20 shapes from 1024x1024 at 512 tokens to 8192x8192
# at 16384: median error 3 to 6 %, and the verdict "FP8 is faster" right for 78 of 80.
BANDWIDTH = 3.0e12
BF16 = Cost(767e12, 0.0, 9.3e-6)
FP8 = {
    "tensorwise": Cost(1607e12, 8.5, 27.0e-6),
    "rowwise": Cost(1741e12, 27.8, 37.5e-6),
    "rowwise_with_gw_hp": Cost(1231e12, 10.5, 23.1e-6),
    "delayed": Cost(1561e12, 6.4, 24.9e-6),
}

# Whether a GPU run has shown that a model whose experts run in FP8 learns what it learns in bf16. None has yet: single
# layers are right against float64 on an H200 (torch 2.11), 23 dB. Until then, experts run in FP8 emulated only.
EXPERTS_PROVEN = False

# Of the weights of a layer of experts: guesses, to be replaced by a fit to examples/benchmark_experts.py.
# They decide nothing before EXPERTS_PROVEN. The casts of bf16 are copies of rows to the experts' order and back.
EXPERTS_BF16 = Cost(600e12, 4.0, 100e-6)
EXPERTS_FP8 = {
    "tensorwise": Cost(1100e12, 12.0, 200e-6),
    "rowwise": Cost(1100e12, 24.0, 200e-6),
    "rowwise_with_gw_hp": Cost(900e12, 16.0, 200e-6),
    "delayed": Cost(1100e12, 10.0, 200e-6),
}


def is_slower(rows: int, columns: int, tokens: int, recipe: str) -> bool:
    """Whether FP8 loses on a (rows, columns) weight at this many tokens, by the cost model above."""
    return BF16.seconds(rows, columns, tokens) < FP8[recipe].seconds(rows, columns, tokens)


def experts_seconds(shapes: list[tuple[int, ...]], work: int, recipe: str) -> tuple[float, float]:
    """Seconds of a layer of experts in bf16 and in FP8.

    Args:
        shapes: (experts, rows, columns) of its weights.
        work: rows in all, tokens times experts a token.
    """

    def total(cost: Cost) -> float:
        return sum(cost.seconds(rows, columns, work, experts) for experts, rows, columns in shapes)

    return total(EXPERTS_BF16), total(EXPERTS_FP8[recipe])
