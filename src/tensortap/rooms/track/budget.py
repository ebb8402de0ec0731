"""A budget: which tensors each step looks at, so that looking costs a share of the time at most.

Tensors take turns, those that were seen longest ago first. What was not looked at has no record;
nothing is averaged or guessed. Each step earns a share of its own time, and pays what its looks
cost: what hooks take in the training thread, and what the threads of tensortap take from the cores.
A look that costs more than a step earns waits until enough steps have earned it.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Iterable

from tensortap.capture.pipeline import pipeline
from tensortap.core.record import Kind
from tensortap.rooms.track.batches import Costs

_UNKNOWN = 100_000  # nanoseconds of a look that was never made
_HOOK = 6_000  # of installing and removing a hook, and of torch calling it, which nobody measures
_LIFTED = 3  # steps in which everything of a module is looked at after an alert about it
_OUTPUTS = (Kind.ACTIVATION, Kind.GRADIENT)

Look = tuple[Kind, ...]


def parse_budget(budget: object) -> float | None:
    """Return a budget as a share of the time; raise ValueError for anything else.

    >>> parse_budget("1%"), parse_budget(0.05), parse_budget(None)
    (0.01, 0.05, None)
    """
    budget = os.environ.get("TENSORTAP_BUDGET") if budget is None else budget
    if budget in (None, ""):
        return None
    try:
        text = str(budget).strip()
        share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ValueError(f"budget must be a share of the time such as '1%', got {budget!r:.80}")
    return share


class Budget:
    """Chooses what each step looks at."""

    def __init__(self, share: float, costs: Costs) -> None:
        self.share = share
        self.chosen: dict[tuple[Kind, str], None] = {}
        self.names: Callable[[], Iterable[tuple[Kind, str]]] | None = None
        self._costs = costs
        self._turns: collections.OrderedDict[str, list[tuple[Kind, str]]] = (
            collections.OrderedDict()
        )
        self._saved = 0.0  # nanoseconds that steps have earned and not paid
        self._step_ns = 0.0  # what a step takes without tensortap
        self._ended = self._threads = 0
        self._before = 0  # cost of all looks so far
        self._lifted: dict[str, int] = {}  # modules with an alert, and the last step
        self._whole_look = float(_UNKNOWN)  # where all is looked at or nothing

    @property
    def everything(self) -> bool:
        """Return whether a step looks at everything or at nothing, as in JAX."""
        return self.names is None

    def lift(self, name: str, step: int) -> None:
        """Look at everything of a module in the next steps."""
        self._lifted[name] = step + _LIFTED

    def begin_step(self, step: int) -> bool:
        """Choose what this step looks at; return whether it is anything."""
        self._lifted = {name: last for name, last in self._lifted.items() if last >= step}
        self.chosen = {}
        if self.everything:
            return self._saved >= self._whole_look or bool(self._lifted)
        if step % 64 == 0 or not self._turns:  # modules and states come and go
            self._arrange()
        left = self._saved
        for turn in list(self._turns):
            wanted = any(turn.partition(" ")[2].startswith(name) for name in self._lifted)
            cost = self._cost(turn)
            if cost > left and not wanted:
                if not self._lifted:
                    break
                continue
            left -= cost
            self._turns.move_to_end(turn)
            self.chosen.update(dict.fromkeys(self._turns[turn]))
        return bool(self.chosen)

    def _arrange(self) -> None:
        """Put what belongs together into one turn: an output and its gradient, a parameter."""
        found: dict[str, list[tuple[Kind, str]]] = {}
        for kind, name in self.names() if self.names is not None else ():
            family = "output" if kind in _OUTPUTS else kind.value
            found.setdefault(f"{family} {name}", []).append((kind, name))
        known = {turn: found[turn] for turn in self._turns if turn in found}
        self._turns = collections.OrderedDict({**known, **found})

    def _cost(self, turn: str) -> float:
        total = 0.0
        for key in self._turns[turn]:
            seen, spent = self._costs.get(key, (0, 0))
            total += spent / seen if seen else _UNKNOWN
        return total + (_HOOK if turn.startswith("output") else 0)

    def end_step(self, now: int, spent: int) -> None:
        """Take the time, and what `tracker.step` has spent, looks included; in nanoseconds."""
        looks = self._costs.total - self._before  # outside of `tracker.step`: in hooks
        self._before = self._costs.total
        threads = pipeline.thread_ns()
        outputs = sum(kind in _OUTPUTS for kind, _ in self.chosen)
        own = looks + spent + threads - self._threads + outputs * _HOOK
        self._threads = threads
        if not self._ended:
            self._ended = now
            return
        plain = max(0, now - self._ended - own)
        self._ended = now
        # the pace changes slowly; a step that waited for data earns no more than others
        self._step_ns = (
            plain
            if not self._step_ns
            else min(0.9 * self._step_ns + 0.1 * plain, 2 * self._step_ns)
        )
        if self.everything and own > self._step_ns * self.share:
            self._whole_look = own
        most = 100 * self.share * self._step_ns + self._most()
        self._saved = min(self._saved + self.share * self._step_ns - own, most)

    def _most(self) -> float:
        """Return what has to be saved for the next turn."""
        if self.everything:
            return self._whole_look
        return self._cost(next(iter(self._turns))) if self._turns else 0.0
