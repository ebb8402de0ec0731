"""`tap.compare(a, b, tolerance="auto")`: are two runs different, or is it only rounding?"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensortap.core.dtypes import DTYPES
from tensortap.core.errors import TensortapError
from tensortap.rooms.align.perturb import MARK

if TYPE_CHECKING:
    from tensortap.rooms.compare.report import CompareReport, Key
    from tensortap.rooms.compare.result import Comparison

LIMIT = 10.0
"""A bug differs by more than this many times what perturbed inputs change."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """The difference of a tensor, divided by the one that perturbed inputs make."""

    key: Key
    ratio: float
    difference: float  # relative, of all elements
    tolerance: float  # the same of the perturbed run

    def __str__(self) -> str:
        return (
            f"{self.key}  {self.ratio:.3g} × its tolerance: differs by {self.difference:.3g}, "
            f"perturbed inputs by {self.tolerance:.3g}"
        )


@dataclass(frozen=True, repr=False)
class ToleranceReport:
    """The result of a comparison with automatic tolerances; true if there is no bug.

    `verdict` is agree (equal bits), rounding, or bug; `first` is what exceeds its tolerance first,
    `ratios` all that differs, in the order of execution.
    """

    verdict: str
    ratios: tuple[Ratio, ...]
    report: CompareReport  # exact: every bit counts
    noise: str
    unjudged: int = 0  # records that differ, of which there are only statistics or digests

    def __bool__(self) -> bool:
        return self.verdict != "bug" and not self.unjudged

    @property
    def first(self) -> Ratio | None:
        """Return the first tensor that differs by more than rounding."""
        return next((each for each in self.ratios if each.ratio > LIMIT), None)

    @property
    def worst(self) -> Ratio | None:
        """Return the tensor with the largest ratio."""
        return max(self.ratios, key=lambda each: each.ratio, default=None)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON."""
        return {
            "format": 1, "of": "runs", "tolerance": "auto", "agree": bool(self),
            "a": self.report.a, "b": self.report.b, "noise": self.noise, "verdict": self.verdict,
            "compared": self.report.compared, "missing": len(self.report.missing),
            "unjudged": self.unjudged,
            "ratios": [
                {**dataclasses.asdict(each), "ratio": min(each.ratio, 1e300)}
                for each in self.ratios
            ],
        }  # fmt: skip

    def __repr__(self) -> str:
        report, shown = self.report, self.first or self.worst
        counts = f"{report.compared:,} records compared, {len(self.ratios):,} differ in bits"
        lines = [f"<{self.verdict}: {counts}, beside {self.noise}>"]
        if shown is not None:
            lines.append(f"  {'first' if self.first else 'worst'}: {shown}")
        if report.missing and not report.allow_missing:
            lines.append(f"  {len(report.missing):,} records are in one run only")
        if self.unjudged:
            lines.append(f"  {self.unjudged:,} records differ, but have no values to judge by")
        return "\n".join(lines)


def compare_with_noise(a: Any, b: Any, *, noise: Any = None, **options: Any) -> ToleranceReport:
    """Compare a run with a reference; `noise` is the reference with perturbed inputs.

    Without `noise`, it is the newest run beside the reference that `tap.perturbed` has marked.
    """
    from tensortap.rooms.compare.runs import compare_runs

    given = [name for name in ("atol", "rtol", "rules") if options.get(name) is not None]
    if given:
        raise TensortapError(f"{', '.join(given)}: tolerance='auto' finds the tolerances itself")
    options = {**options, "atol": 0.0, "rtol": 0.0}
    noise = _beside(b) if noise is None else noise
    base = compare_runs(noise, b, **{**options, "allow_missing": True, "mapping": ()})
    if not base.compared:
        raise TensortapError(f"noise={base.a} has no record in common with {base.b}")
    usual = {each.key: each.comparison for each in base.differences}
    found = compare_runs(a, b, **options)
    judged = [each for each in found.differences if each.by == "value"]
    if found.compared and found.compared == len(found.differences) > len(judged) == 0:
        raise TensortapError("tolerance='auto' needs values: record them with tensors=True")
    ratios = [_ratio(each.key, each.comparison, usual) for each in judged]
    is_bug = any(each.ratio > LIMIT for each in ratios)
    is_bug |= bool(found.missing) and not found.allow_missing
    verdict = "bug" if is_bug else "rounding" if ratios else "agree"
    return ToleranceReport(
        verdict, tuple(ratios), found, base.a, len(found.differences) - len(judged)
    )


def _beside(b: Any) -> Path:
    path = getattr(b, "path", b)
    if not isinstance(path, (str, Path)) or "://" in str(path):
        raise TensortapError("noise must name the perturbed run: the reference is no local run")
    own = Path(path).resolve()
    marked = [e for e in own.parent.iterdir() if e != own and (e / MARK).is_file()]
    if not marked:
        raise TensortapError(
            f"no perturbed run is beside {path}: run the reference once more within "
            "`with tap.perturbed(model):`, or pass noise="
        )
    return max(marked, key=lambda each: (each / MARK).stat().st_mtime_ns)


def _ratio(key: Key, found: Comparison, usual: dict[Key, Comparison]) -> Ratio:
    """Return the ratio of a difference to that which perturbed inputs make.

    It is the larger one of the ratios of both norms, so that a single wrong element shows. Where
    inputs make no difference, the tolerance is one unit in the last place.
    """
    noise = usual.get(key)
    if found.nonfinite or not found.count:  # other shapes, or no numbers
        return Ratio(key, math.inf, math.inf, 0.0)
    one_ulp, largest = _rounding(found), noise.max_abs if noise is not None else 0.0
    difference = min(found.max_rel, 1e300) if found.rel_l2 is None else found.rel_l2
    if found.ulps is not None and found.ulps <= 1:
        return Ratio(key, min(1.0, difference / one_ulp), difference, one_ulp)
    if noise is None:  # such as weights: each number counts
        return Ratio(key, max(difference / one_ulp, found.ulps or math.inf), difference, one_ulp)
    scale = found.max_abs / difference if difference else 0.0
    tolerance = max(one_ulp, noise.rel_l2 or 0.0)
    ratio = max(difference / tolerance, found.max_abs / max(largest, one_ulp * scale))
    return Ratio(key, ratio, difference, tolerance)


def _rounding(found: Comparison) -> float:
    """Return the relative size of a unit in the last place of the coarser dtype."""
    formats = [DTYPES[dtype].format for dtype in found.dtypes or () if dtype in DTYPES]
    return max((2.0 ** (1 - each.digits) for each in formats if each is not None), default=2.0**-23)
