"""The result of judging every module of a model on the inputs of a reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tensortap.core.files import plain
from tensortap.rooms.compare.result import FORMAT, Comparison, figures_of
from tensortap.rooms.compare.text import figure_table, figures_of_row

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

BATCH = "(batch)"
"""Stands for the code before the model."""
LOSS = "(loss)"
"""Stands for the code after the model, until the gradient of its output."""
GRADIENTS = "(gradients)"
"""Stands for the code between the backward pass and the optimizer, such as clipping."""
OPTIMIZER = "(optimizer)"


@dataclass(frozen=True, slots=True)
class FaultyModule:
    """A module that does not compute what the reference computes from the same inputs."""

    module: str
    """Its name, or one of ``(batch)``, ``(loss)``, ``(gradients)`` and ``(optimizer)``."""
    phase: str
    """``forward``, ``backward`` or ``optimizer``."""
    what: str
    """Description of the first difference."""
    comparison: Comparison = field(default_factory=lambda: Comparison(False))
    """Comparison of the first tensor that differs with the recorded one."""
    others: tuple[str, ...] = ()
    """Modules that may be at fault in its place."""
    explanations: tuple[str, ...] = ()
    count: int = 1
    """Number of tensors that differ."""
    ranks: tuple[int, ...] = ()
    """The ranks on which it was found, if there are several."""

    @property
    def title(self) -> str:
        """The module, and those that may be at fault in its place."""
        return " or ".join((self.module, *self.others))

    def __str__(self) -> str:
        text = f"{self.title}: {self.what}: {self.comparison.line}"
        return text + "".join(f"\n  {each}" for each in self.explanations)

    def to_json(self) -> dict[str, Any]:
        """Return the finding as JSON."""
        return {
            "module": self.module, "phase": self.phase, "what": self.what,
            "others": list(self.others), "explanations": list(self.explanations),
            "count": self.count, "ranks": list(self.ranks),
            "comparison": figures_of(self.comparison),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class BisectReport:
    """All faulty modules of a step; true if there is none."""

    reference: str
    step: int
    faults: tuple[FaultyModule, ...] = ()
    """Every module that is faulty, in the order of execution."""
    unsure: tuple[FaultyModule, ...] = ()
    """Modules that draw random numbers, and may differ because of those alone."""
    judged: dict[str, int] = field(default_factory=dict)
    """Number of tensors that were judged, by kind."""
    unjudged: dict[str, str] = field(default_factory=dict)
    """Names that could not be judged, and why."""
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return not self.faults

    @property
    def modules(self) -> tuple[str, ...]:
        """The names of all faulty modules."""
        return tuple(each.module for each in self.faults)

    @property
    def headline(self) -> str:
        """The verdict in one line."""
        count = len(self.faults)
        found = f"{count} faulty module{'s' if count > 1 else ''}" if count else "no faulty module"
        return f"{found} at step {self.step}, by {self.reference}"

    @property
    def counts(self) -> str:
        """Text with the number of judged tensors by kind."""
        words = [f"{number:,} {kind}" for kind, number in self.judged.items() if number]
        return f"judged: {', '.join(words) or 'nothing'}"

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON."""
        return {
            "format": FORMAT, "of": "bisect", "agree": bool(self), "reference": self.reference,
            "step": self.step,
            "faults": [each.to_json() for each in self.faults],
            "unsure": [each.to_json() for each in self.unsure],
            "judged": self.judged, "unjudged": self.unjudged, "notes": list(self.notes),
        }  # fmt: skip

    def __str__(self) -> str:
        lines = [self.headline, *map(str, self.faults)]
        lines += [f"unsure: {each}" for each in self.unsure]
        return "\n".join([*lines, *self._remarks()])

    def _remarks(self) -> list[str]:
        lines = [self.counts, *self.notes]
        if self.unjudged:
            name, reason = next(iter(self.unjudged.items()))
            lines.append(f"not judged: {len(self.unjudged):,} names, such as {name}: {reason}")
        return lines

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.text import Text

        style = "bold green" if self else "bold red"
        sign = "✓ " if self else "✗ "
        parts: list[RenderableType] = [Text(sign + plain(self.headline), style=style)]
        for title, found in (("faulty", self.faults), ("unsure", self.unsure)):
            if found:
                parts += [Text(), _table(title, found)]
        return Group(*parts, Text(), *(Text(plain(each), style="dim") for each in self._remarks()))


def _table(title: str, found: tuple[FaultyModule, ...]) -> RenderableType:
    from rich.text import Text

    ranked = any(each.ranks for each in found)
    columns = [title, "phase", *(["rank"] if ranked else []), "max|Δ|", "relative", "differ"]
    table = figure_table(*columns, "what")
    for each in found:
        largest, relative, _, share = figures_of_row(each.comparison)
        said = [each.what, *each.explanations]
        if not share:
            said.append(each.comparison.reason)
        table.add_row(
            Text(plain(each.title), style="bold"), Text(each.phase, style="dim"),
            *([", ".join(map(str, each.ranks))] if ranked else []), largest, relative, share,
            Text(plain("; ".join(filter(None, said)))),
        )  # fmt: skip
    return table
