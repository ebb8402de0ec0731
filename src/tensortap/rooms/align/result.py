"""The result of `tap.align`: how many tokens match, how far values are apart, where and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import plotly.graph_objects as go
    from numpy.typing import NDArray

    from tensortap.rooms.align.contexts import TokenRun

AGREE, ROUNDING, DIFFER, NONE = "agree", "rounding only", "differ", "nothing matches"
_SHOWN = 12  # names in the text


@dataclass(frozen=True, slots=True)
class NameDifference:
    """The differences of the rows of one name.

    Hidden states and numbers: relative to the larger one. Log-probabilities: B - A in nats.
    Experts: the share of other ones.
    """

    name: str
    name_b: str
    kind: str
    type: str  # class of the module, if there is one
    rows: int
    mean: float
    largest: float
    quantiles: tuple[float, ...]  # of 50, 90 and 99 %
    share: float  # of rows that differ at all
    verdict: str
    tolerance: float  # of the median row
    entry_a: NDArray[np.int64] = field(repr=False)
    entry_b: NDArray[np.int64] = field(repr=False)
    a: NDArray[Any] = field(repr=False)
    b: NDArray[Any] = field(repr=False)
    difference: NDArray[np.float64] = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        names = [each.name for each in dataclasses.fields(self)][:11]
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class LogprobDifference:
    """Log-probabilities of the sampled tokens: A is the trainer, B the engine."""

    name: str
    rows: int
    mean: float  # of |B - A|, in nats
    largest: float
    quantiles: dict[str, float]
    k1: float  # mean of log B - log A: estimates KL(B ‖ A) of tokens that B has sampled
    k3: float  # mean of r - 1 - log r with r = A / B: the same, never negative
    outside: float  # share of importance ratios A / B outside 0.8 to 1.2


@dataclass(frozen=True, slots=True)
class WorstToken:
    """A token whose log-probabilities are farthest apart."""

    token: int
    place: int
    a: float
    b: float
    context: tuple[int, ...]  # the last ids up to the token
    text: str


@dataclass(frozen=True, slots=True)
class Reason:
    """A reason that explains the difference, with its evidence."""

    name: str
    evidence: str
    before: float  # mean difference, in nats
    after: float  # the same once the reason is taken into account


@dataclass(frozen=True, slots=True)
class Alignment:
    """Two runs, matched token by token; true if nothing but rounding differs."""

    a: str
    b: str
    tokens_a: int
    tokens_b: int
    matched: int
    verdict: str
    names: tuple[NameDifference, ...]
    logprobs: LogprobDifference | None
    first: NameDifference | None  # the first layer that differs
    reasons: tuple[Reason, ...] = ()
    worst: tuple[WorstToken, ...] = ()
    unknown: int = 0  # values whose tokens were dropped
    runs: tuple[TokenRun, TokenRun] | None = field(default=None, repr=False)

    def __bool__(self) -> bool:
        return self.verdict in (AGREE, ROUNDING)

    def __repr__(self) -> str:
        return "\n".join(_lines(self))

    @property
    def reason(self) -> str:
        """The name of the reason that explains most; empty if none was found."""
        return self.reasons[0].name if self.reasons else ""

    def to_json(self) -> dict[str, Any]:
        """Return everything but the rows."""
        return {
            "a": self.a, "b": self.b, "agree": bool(self), "verdict": self.verdict,
            "tokens_a": self.tokens_a, "tokens_b": self.tokens_b, "matched": self.matched,
            "unknown": self.unknown, "logprobs": _fields(self.logprobs),
            "first": None if self.first is None else self.first.to_json(),
            "reasons": [_fields(each) for each in self.reasons],
            "worst": [_fields(each) for each in self.worst],
            "names": [each.to_json() for each in self.names],
        }  # fmt: skip

    def figure(self) -> go.Figure:
        """Return tokens by layers, colored by difference, as a plotly figure."""
        from tensortap.rooms.align.picture import alignment_figure
        from tensortap.rooms.figures.plots import plotly_figure

        return plotly_figure(alignment_figure(self))

    def to_html(self, path: str | Path) -> Path:
        """Write a report into one HTML file."""
        from tensortap.rooms.align.html import write_html

        return write_html(self, path)


def _fields(value: Any) -> Any:
    return None if value is None else dataclasses.asdict(value)


def _lines(found: Alignment) -> Iterator[str]:
    tokens = f"{found.matched:,} contexts are in both, of {found.tokens_a:,} and {found.tokens_b:,}"
    yield f"{found.verdict}: {tokens}"
    yield from finding_lines(found)
    if found.verdict == "differ":
        if not found.reasons:
            yield "no reason was found; model= lets more of them be tried"
        for token in found.worst[:5]:
            text = f"  {token.text!r}" if token.text else ""
            yield f"  token {token.token} at {token.place}: A {token.a:.4f}, B {token.b:.4f}{text}"
    for layer in found.names[:_SHOWN]:
        yield f"  {layer.verdict:13} {layer.name}: {layer.rows:,} rows, mean {layer.mean:.3g}"
    if len(found.names) > _SHOWN:
        yield f"  and {len(found.names) - _SHOWN:,} more names"


def finding_lines(found: Alignment) -> Iterator[str]:
    """Yield what text, page and report say: what is lost, how far apart, where first, and why."""
    if found.unknown:
        yield f"{found.unknown:,} values have no tokens: their record was dropped"
    if (each := found.logprobs) is not None:
        quantiles = ", ".join(f"{float(q):.0%} {value:.3g}" for q, value in each.quantiles.items())
        sizes = f"mean {each.mean:.3g}, largest {each.largest:.3g} nats ({quantiles})"
        yield f"{each.name}: |B - A| {sizes}, {each.rows:,} tokens"
        yield f"KL: K1 {each.k1:.3g}, K3 {each.k3:.3g}; ratios outside 0.8-1.2: {each.outside:.2%}"
    if (first := found.first) is not None:
        size = f"differs by {first.quantiles[0]:.3g}, relative"
        if first.kind == "experts":
            size = f"other experts for {first.share:.2%} of tokens"
        name = f"{first.name} ({first.type})" if first.type else first.name
        yield f"first layer that differs: {name}: {size}; all before it agree"
    for reason in found.reasons:
        yield f"reason: {reason.name}: {reason.evidence}"
