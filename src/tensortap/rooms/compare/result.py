"""The result of comparing two values, also as JSON; docs/compare.md is the specification.

Numbers that JSON lacks are text: ``"NaN"``, ``"Infinity"``, ``"-Infinity"``.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from tensortap.text.json_values import as_json

FORMAT = 1


@dataclass(frozen=True, slots=True, repr=False)
class Comparison:
    """Whether two values agree, and by how much they differ; true if they agree.

    For containers, the figures cover all tensors and numbers inside, `parts` are the differing
    ones, and `path` locates a part. Figures cover the pairs of finite numbers; `nonfinite` counts
    the pairs in which one is not finite and the other is different.
    """

    equal: bool
    reason: str = ""  # why they differ, in words
    path: str = ""  # within the containers: ["layers"][3].weight
    notes: tuple[str, ...] = ()  # what does not count: other dtypes, a list against a tuple
    shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    dtypes: tuple[str, str] | None = None

    count: int = 0  # pairs
    finite: int = 0
    mismatches: int = 0  # pairs that are not close, including `nonfinite`
    nonfinite: int = 0
    max_abs: float = 0.0
    mean_abs: float = 0.0
    max_rel: float = 0.0  # the largest |a - b| / |b|; inf where only b is zero
    mean_rel: float = 0.0
    rel_l2: float | None = None  # norm(a - b) / norm(b); None for containers
    cosine: float | None = None  # 0 if only one is all zeros; None for containers
    ulps: int | None = None  # distance in last places of the coarser dtype; None for integers
    worst: tuple[int, ...] | None = None  # index of the pair that exceeds the tolerance most
    values: tuple[Any, Any] | None = None  # both values at that index
    passing_atol: float | None = None  # the smallest that would pass with this rtol, if any would
    passing_rtol: float | None = None  # the smallest that would pass with this atol, if any would

    leaves: int = 1  # compared
    differing: int = 0  # leaves that differ
    parts: tuple[Comparison, ...] = ()  # the first thousand differing parts of a container

    def __bool__(self) -> bool:
        return self.equal

    @property
    def share(self) -> float:
        """Return the share of pairs that are not close."""
        return self.mismatches / self.count if self.count else 0.0

    def __repr__(self) -> str:
        head = "equal" if self.equal and not self.max_abs else "close" if self.equal else "differ"
        text = f"<{head}{self._summary()}>"
        if not self.parts:
            return text
        shown = [f"  {part.path}: {part.line}" for part in self.parts[:10]]
        more = self.differing - len(shown)
        return "\n".join([text, *shown, *([f"  … and {more:,} more"] if more > 0 else [])])

    @property
    def line(self) -> str:
        """Return why they differ, or how close they are, in one line."""
        return self._summary().removeprefix(": ") or "equal"

    def _summary(self) -> str:
        words = [self.reason] if self.reason else []
        if self.max_abs or self.mismatches:
            words += self._figures()
        words += self.notes
        return ": " + ", ".join(words) if words else ""

    def _figures(self) -> list[str]:
        words = [f"max|Δ|={self.max_abs:.3g}"]
        if self.max_rel:
            words.append(f"rel={self.max_rel:.3g}")
        if self.ulps is not None:
            words.append(f"{self.ulps} ulp" if self.ulps < 10**6 else f"{self.ulps:.3g} ulp")
        if self.cosine is not None and self.count > 1:
            words.append(f"cosine={self.cosine:.6g}")
        if self.worst is not None and self.values is not None:
            where = "" if self.worst == () else f" at {list(self.worst)}"
            words.append(f"worst{where}: {_show(self.values[0])} and {_show(self.values[1])}")
        if not self.equal and not self.parts:
            words.append(self._passing())
        return words

    def _passing(self) -> str:
        would = [
            f"{name}={rounded_up(value)}"
            for name, value in (("atol", self.passing_atol), ("rtol", self.passing_rtol))
            if value is not None
        ]
        return f"{' or '.join(would)} would pass" if would else "no tolerance would pass"


def rounded_up(tolerance: float) -> str:
    """Return a tolerance with three digits that passes what the tolerance itself passes.

    >>> rounded_up(0.0012341), rounded_up(0.5)
    ('0.00124', '0.5')
    """
    text = f"{tolerance:.3g}"
    if float(text) >= tolerance:
        return text
    unit = 10.0 ** (math.floor(math.log10(tolerance)) - 2)
    return f"{tolerance + unit / 2:.3g}"


def _show(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float) else repr(value)


def comparison_as_json(found: Comparison, a: str, b: str) -> dict[str, Any]:
    """Return the comparison of two files as JSON."""
    head = {"format": FORMAT, "of": "files", "agree": bool(found), "a": a, "b": b}
    return {**head, "comparison": figures_of(found)}


def figures_of(found: Comparison) -> dict[str, Any]:
    """Return all figures of a comparison under their Python names.

    >>> figures_of(Comparison(False, count=2, mismatches=1, max_rel=float("inf")))["max_rel"]
    'Infinity'
    """
    fields = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    fields["share"] = found.share
    fields["line"] = found.line
    fields["parts"] = [figures_of(part) for part in found.parts]
    return {name: as_json(value) for name, value in fields.items()}
