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
    yield f"{found.verdict}: {found.matched:,} of {found.tokens_a:,} and {found.tokens_b:,} tokens match"
    if found.unknown:
        yield f"  {found.unknown:,} values have no tokens: their record was dropped"
    each = found.logprobs
    if each is not None:
        quantiles = ", ".join(f"{float(q):.0%} {v:.3g}" for q, v in each.quantiles.items())
        yield f"{each.name}: |B - A| mean {each.mean:.3g}, largest {each.largest:.3g} nats ({quantiles})"
        yield f"  KL: K1 {each.k1:.3g}, K3 {each.k3:.3g}; ratios outside 0.8-1.2: {each.outside:.2%}"
    if found.first is not None:
        first = found.first
        module = f" ({first.type})" if first.type else ""
        what = "other experts for" if first.kind == "experts" else "differs by"
        size = f"{first.share:.2%} of tokens" if first.kind == "experts" else f"{first.quantiles[0]:.3g}"
        yield f"first layer that differs: {first.name}{module}: {what} {size}; all before it agree"
    for reason in found.reasons:
        yield f"reason: {reason.name}: {reason.evidence}"
    if found.verdict == "differ" and not found.reasons:
        yield "no reason was found; model= lets more of them be tried"
    for token in found.worst[:5] if found.verdict == "differ" else ():
        text = f"  {token.text!r}" if token.text else ""
        yield f"  token {token.token} at {token.place}: A {token.a:.4f}, B {token.b:.4f}{text}"
    for layer in found.names[:_ROWS]:
        yield f"  {layer.verdict:13} {layer.name}: {layer.rows:,} rows, mean {layer.mean:.3g}"
    if len(found.names) > _ROWS:
        yield f"  and {len(found.names) - _ROWS:,} more names"
