"""The conversion report: a row for every matrix product with a weight, and the table that a user reads."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Row:
    """One GEMM-bearing module or 3-D expert parameter."""

    name: str
    shape: tuple[int, ...]
    converted: bool
    reason: str
    flops: float
    """Of its GEMMs in one training step, per token."""
    fp8_flops: float = 0.0
    """The part of `flops` that runs in FP8."""
    expert: bool = False
    """It holds one matrix for each expert."""


@dataclass
class ConversionReport:
    """What was converted and what was not. `str()` is an aligned table with repeated blocks folded."""

    rows: list[Row]
    recipe: str
    tokens: int | None = None
    notes: list[str] = field(default_factory=list)
    """What else was done to the model: masters, compile, sharding, gather."""

    @property
    def converted(self) -> list[Row]:
        return [row for row in self.rows if row.converted]

    @property
    def flop_coverage(self) -> float:
        """Share of the FLOPs of all matrix products with weights (forward and backward) that runs in FP8, 0 to 1."""
        total = sum(row.flops for row in self.rows)
        return sum(row.fp8_flops for row in self.rows) / total if total else 0.0

    @property
    def expert_share(self) -> float:
        """Share of those FLOPs that experts do, in FP8 or not, 0 to 1."""
        total = sum(row.flops for row in self.rows)
        return sum(row.flops for row in self.rows if row.expert) / total if total else 0.0

    def __str__(self) -> str:
        summary = (
            f"FP8 ({self.recipe}): {len(self.converted)} of {len(self.rows)} layers, "
            f"{self.flop_coverage:.1%} of the matrix FLOPs"
        )
        notes = self.notes
        experts = [row for row in self.rows if row.expert]
        if experts:
            high = Counter(row.reason for row in experts if not row.converted)
            said = [f"{n} of {len(experts)} in bf16: {reason}" for reason, n in high.items()] or [
                "all in FP8"
            ]
            notes = [f"experts: {self.expert_share:.1%} of the matrix FLOPs; {'; '.join(said)}", *notes]
        return "\n".join([summary, *table(self.rows, "runs in"), *(f"- {note}" for note in notes)])


def table(rows: list[Row], column: str, high: str = "bf16") -> list[str]:
    """`rows` as aligned lines with a header, repeated blocks folded. `column` says what FP8 or `high` is true of."""
    lines = [("module", "shape", "count", column, "reason"), *_fold(rows, high)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]


def _fold(rows: list[Row], high: str) -> list[tuple[str, str, str, str, str]]:
    """Rows that differ only in block numbers become one: `model.layers.0-31.mlp.up_proj`."""
    groups: dict[tuple[str, tuple[int, ...], bool, str], list[list[int]]] = {}
    for row in rows:
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "{}", row.name)
        indices = [int(part) for part in row.name.split(".") if part.isdigit()]
        groups.setdefault((pattern, row.shape, row.converted, row.reason), []).append(indices)
    return [
        (
            pattern.format(*(_ranges(sorted(set(column))) for column in zip(*members, strict=True))),
            "x".join(map(str, shape)),
            str(len(members)),
            "FP8" if converted else high,
            reason,
        )
        for (pattern, shape, converted, reason), members in groups.items()
    ]


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
