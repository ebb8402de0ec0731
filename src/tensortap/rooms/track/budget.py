"""A budget: which tensors each step looks at, so that looking costs a share of the time at most.

Tensors take turns, those that were seen longest ago first. What was not looked at has no record;
nothing is averaged or guessed. Each step earns a share of its own time, and pays what its looks
cost: what hooks take in the training thread, and what the threads of tensortap take from the cores.
A look that costs more than a step earns waits until enough steps have earned it. The norm of all
gradients comes first, but takes at most half of what a step earns. The first four steps look at
everything, and pay nothing; so do steps 10, 30, 100, 300 and so on, which pay.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Iterable

from tensortap.capture.pipeline import pipeline
from tensortap.core.record import Kind
from tensortap.rooms.track.batches import Costs

_UNKNOWN = 100_000  # nanoseconds of a look that was never made
_HOOK = 6_000  # of torch calling a hook, which nobody measures
_SPENT = 0.8  # of a budget: what looking does to caches and allocators, nobody measures
_LIFTED = 3  # steps in which everything of a module is looked at after an alert about it
_DEBT = 30  # steps whose earnings a step may owe: what the scheduler took was no look
_FEW = 20  # steps after which the pace and the cost of the norm are known
_WRITING = 10  # steps in which the records of free looks are written
_FIRST = 2  # looks at everything that are not paid for: the first ones compile
_FREE_STEPS = 4  # in which everything is looked at: rules want three steps in a row
_OUTPUTS = (Kind.ACTIVATION, Kind.GRADIENT)

Look = tuple[Kind, ...]


def parse_budget(budget: object) -> float | None:
    """Return a budget as a share of the time; raise ValueError for anything else.

    None is what the environment says, False no budget.

    >>> parse_budget("1%"), parse_budget(0.05), parse_budget(False)
    (0.01, 0.05, None)
    """
    budget = os.environ.get("TENSORTAP_BUDGET") if budget is None else budget
    if budget is None or budget is False or budget == "":
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
        self.checks = True  # whether this step computes the norm of all gradients
        self._costs = costs
        self._turns: collections.OrderedDict[str, list[tuple[Kind, str]]] = (
            collections.OrderedDict()
        )
        self._tried: dict[tuple[Kind, str], None] = {}
        self._begun, self._arranging = 0, 1  # steps so far, and until names are looked up again
        self._saved = 0.0  # nanoseconds that steps have earned and not paid
        self._step_ns = 0.0  # what a step takes without tensortap
        self._ended = self._threads = self._written = 0
        self._before = 0  # cost of all looks so far
        self._lifted: dict[str, int] = {}  # modules with an alert, and the last step
        self._check_saved, self._check_ns = 0.0, 0.0
        self._whole_look = float(_UNKNOWN)  # where all is looked at or nothing
        self._whole_looks = self._since_look = 0

    @property
    def everything(self) -> bool:
        """Return whether a step looks at everything or at nothing, as in JAX."""
        return self.names is None

    @property
    def _earned(self) -> float:
        return _SPENT * self.share * self._step_ns

    def lift(self, module: str, step: int) -> None:
        """Look at everything of a module in the next steps; "" is the whole model."""
        self._lifted[module] = step + _LIFTED

    def hurry(self, kind: Kind, name: str) -> None:
        """Look at a tensor again before all others, as soon as that is paid for."""
        if (turn := _turn_of(kind, name)) in self._turns:
            self._turns.move_to_end(turn, last=False)

    def begin_step(self, step: int) -> bool:
        """Choose what this step looks at; return whether it is anything."""
        if not self._begun:  # the first picture is whole, and tells what each name costs
            self._lifted[""] = step + _FREE_STEPS - 1
        whole = _is_whole(self._begun)
        self._lifted = {name: last for name, last in self._lifted.items() if last >= step}
        self.chosen = {}
        self._check_saved = min(self._check_saved + self._earned / 2, 2 * self._check_ns)
        self.checks = self._begun < _FEW or self._check_saved >= self._check_ns
        self._begun += 1
        if self.everything:
            looks = self._saved >= self._whole_look or bool(self._lifted) or whole
            self._since_look = 0 if looks else self._since_look + 1
            return looks
        if whole or self._begun >= self._arranging:  # modules and states come and go
            self._arranging += min(self._begun, 256)
            self.arrange()
        left = self._saved - self._check_ns * self.checks
        for turn in list(self._turns) if whole or self._lifted or left > 0 else ():
            cost = self._cost(turn)
            if not (whole or self._is_lifted(turn)):
                if cost > left:
                    if not self._lifted:
                        break
                    continue
                left -= cost
            self._turns.move_to_end(turn)
            self.chosen.update(dict.fromkeys(self._turns[turn]))
        self._tried.update(self.chosen)
        return bool(self.chosen)

    @property
    def waiting(self) -> int:
        """Return how many names have not had a turn yet."""
        return sum(key not in self._tried for turn in self._turns.values() for key in turn)

    def arrange(self) -> None:
        """Put what belongs together into one turn: an output and its gradient, a parameter."""
        found: dict[str, list[tuple[Kind, str]]] = {}
        for kind, name in self.names() if self.names is not None else ():
            found.setdefault(_turn_of(kind, name), []).append((kind, name))
        known = {turn: found[turn] for turn in self._turns if turn in found}
        self._turns = collections.OrderedDict({**known, **found})

    def _is_lifted(self, turn: str) -> bool:
        name = turn.partition(" ")[2]
        return any(
            not module or name == module or name.startswith((f"{module}.", f"{module}["))
            for module in self._lifted
        )

    def _cost(self, turn: str) -> float:
        total = 0.0
        for key in self._turns[turn]:
            seen, spent = self._costs.get(key, (0, 0))
            total += spent / seen if seen else _UNKNOWN
        return total + (_HOOK if turn.startswith("output") else 0)

    def checked(self, spent: int) -> None:
        """Take what the norm of all gradients has cost, in nanoseconds."""
        # the scheduler may have taken the processor away: nothing got dearer
        self._check_ns = min(spent, 1.05 * self._check_ns) if self._check_ns else spent
        self._check_saved -= self._check_ns

    def end_step(self, now: int, spent: int) -> None:
        """Take the time, and what `tracker.step` has spent, looks included; in nanoseconds."""
        looks = self._costs.total - self._before  # outside of `tracker.step`: in hooks
        self._before = self._costs.total
        threads = pipeline.thread_ns()
        outputs = sum(kind in _OUTPUTS for kind, _ in self.chosen)
        # what each step costs anyway must not keep all others from their turn
        fixed = min(spent, self._earned / 2) if self._step_ns else spent
        self._written = _WRITING if self._lifted else max(0, self._written - 1)
        # what free looks have left to write is free, too
        written = 0 if self._written else threads - self._threads
        own: float = looks + fixed + written + outputs * _HOOK
        self._threads = threads
        elapsed, self._ended = now - self._ended, now
        if elapsed == now:
            return
        if self.everything and self._since_look < 2 and self._step_ns:
            own = self._price_of_everything(own, elapsed)
        plain = max(0.0, elapsed - own)
        # the pace is about the median: a pause between two steps does not earn looks for hours
        if not self._step_ns:
            self._step_ns = plain
        self._step_ns *= 1.05 if plain > self._step_ns else 0.95
        if self._lifted:
            own = min(own, self._earned)
        most = 100 * self._earned + self._most()
        self._saved = min(max(self._saved + self._earned - own, -_DEBT * self._earned), most)

    def _price_of_everything(self, own: float, elapsed: int) -> float:
        """Return what a step with a look takes more than others; compiled code is not measured."""
        own = max(own, elapsed - self._step_ns)
        if self._since_look == 0:
            self._whole_looks += 1
            if self._whole_looks > _FIRST:
                self._whole_look = own
        return own if self._whole_looks > _FIRST else 0.0

    def _most(self) -> float:
        """Return what has to be saved for the next turn."""
        if self.everything:
            return self._whole_look
        return self._cost(next(iter(self._turns))) if self._turns else 0.0


def _is_whole(number: int) -> bool:
    """Return whether a step looks at everything: 10, 30, 100, 300 and so on.

    >>> [number for number in range(4000) if _is_whole(number)]
    [10, 30, 100, 300, 1000, 3000]
    """
    return number >= 10 and str(number).rstrip("0") in ("1", "3")


def _turn_of(kind: Kind, name: str) -> str:
    return f"{'output' if kind in _OUTPUTS else kind.value} {name}"
