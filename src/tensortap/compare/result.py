"""What a comparison found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, repr=False)
class Comparison:
    """Whether two values agree, and by how much they do not; true or false by itself.

    Of containers, the figures are over all their tensors and numbers, `parts` are what differs
    in them, and `path` says where a part lies. Figures are over the pairs of finite numbers;
    `nonfinite` counts the pairs where one is not finite and the other is not the same.
    """

    equal: bool
    reason: str = ""
    """Why not, in words."""
    path: str = ""
    """Where in the containers: ``["layers"][3].weight``."""
    notes: tuple[str, ...] = ()
    """What differs and is no difference: dtypes, a list against a tuple."""
    shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    dtypes: tuple[str, str] | None = None

    count: int = 0
    """Pairs of numbers."""
    finite: int = 0
    mismatches: int = 0
    """Pairs that are not close, those of `nonfinite` among them."""
    nonfinite: int = 0
    max_abs: float = 0.0
    mean_abs: float = 0.0
    max_rel: float = 0.0
    """The largest ``|a - b| / |b|``; inf where only b is zero."""
    mean_rel: float = 0.0
    rel_l2: float | None = None
    """``norm(a - b) / norm(b)``; None of containers."""
    cosine: float | None = None
    """Of the angle between the two; 0 if only one is all zeros, None of containers."""
    ulps: int | None = None
    """The most numbers of the coarser dtype that lie between two; None of integers."""
    worst: tuple[int, ...] | None = None
    """The index of the pair that exceeds the tolerance most, or comes nearest to it."""
    values: tuple[Any, Any] | None = None
    """Both values there."""
    passing_atol: float | None = None
    """The smallest atol that would have passed with this rtol; None: none would."""
    passing_rtol: float | None = None
    """The smallest rtol that would have passed with this atol; None: none would."""

    leaves: int = 1
    """How many values without parts were compared."""
    differing: int = 0
    """How many of these differ."""
    parts: tuple[Comparison, ...] = ()
    """What differs in a container, in its order; the first thousand."""

    def __bool__(self) -> bool:
        return self.equal

    @property
    def share(self) -> float:
        """The part of the pairs that are not close."""
        return self.mismatches / self.count if self.count else 0.0

    def __repr__(self) -> str:
        head = "equal" if self.equal and not self.max_abs else "close" if self.equal else "differ"
        text = f"<{head}{self._about()}>"
        if not self.parts:
            return text
        shown = [f"  {part.path}: {part.line}" for part in self.parts[:10]]
        more = self.differing - len(shown)
        return "\n".join([text, *shown, *([f"  … and {more:,} more"] if more > 0 else [])])

    @property
    def line(self) -> str:
        """Why they differ, or how close they are, in a line."""
        return self._about().removeprefix(": ") or "equal"

    def _about(self) -> str:
        said = [self.reason] if self.reason else []
        if self.max_abs or self.mismatches:
            said += self._figures()
        said += self.notes
        return ": " + ", ".join(said) if said else ""

    def _figures(self) -> list[str]:
        said = [f"max|Δ|={self.max_abs:.3g}"]
        if self.max_rel:
            said.append(f"rel={self.max_rel:.3g}")
        if self.ulps is not None:
            said.append(f"{self.ulps} ulp" if self.ulps < 10**6 else f"{self.ulps:.3g} ulp")
        if self.cosine is not None and self.count > 1:
            said.append(f"cosine={self.cosine:.6g}")
        if self.worst is not None and self.values is not None:
            where = "" if self.worst == () else f" at {list(self.worst)}"
            said.append(f"worst{where}: {_show(self.values[0])} and {_show(self.values[1])}")
        if not self.equal and not self.parts:
            said.append(self._passing())
        return said

    def _passing(self) -> str:
        would = [
            f"{name}={value:.3g}"
            for name, value in (("atol", self.passing_atol), ("rtol", self.passing_rtol))
            if value is not None
        ]
        return f"{' or '.join(would)} would pass" if would else "no tolerance would pass"


def _show(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float) else repr(value)
