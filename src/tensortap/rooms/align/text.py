"""An alignment as text: the verdict first, then where, why, and the worst tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensortap.rooms.align.result import Alignment

_ROWS = 12


def alignment_text(found: Alignment) -> str:
    return "\n".join(_lines(found))


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
    for layer in found.names[:_ROWS]:
        yield f"  {layer.verdict:13} {layer.name}: {layer.rows:,} rows, mean {layer.mean:.3g}"
    if len(found.names) > _ROWS:
        yield f"  and {len(found.names) - _ROWS:,} more names"


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
