"""A budget: which tensors each step looks at, so that looking costs a share of the time at most.

Tensors take turns, those that were seen longest ago first. What was not looked at has no record;
nothing is averaged or guessed. Each step earns a share of its own time. It pays what it costs
anyway: `tracker.step`, and what the threads of tensortap take from the cores. The norm of all
gradients gets what is left, up to three quarters; if that is too little, it is computed in each
n-th step. The rest is saved for looks: at least a quarter, so that every tensor gets its turn. A
look that costs more than a step earns waits until enough steps have earned it. It pays what it
costs usually, because the scheduler may take the processor away in any step. The first four steps
look at everything, and pay nothing; so do steps 10, 30, 100, 300 and so on, which pay.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Iterable

from tensortap.capture.pipeline import pipeline
from tensortap.core.record import Kind
from tensortap.rooms.track.batches import Costs, usual

_UNKNOWN = 100_000  # nanoseconds of a look that was never made
_HOOK = 15_000  # of torch calling a hook of a module, which nobody measures
_SPENT = 0.8  # of a budget: what looking does to caches and allocators, nobody measures
_FOR_LOOKS = 0.25  # of a budget, at least
_FOR_NORM = 0.125  # of a budget, at least
_LOOKING = 150_000  # of a step with looks, besides what each costs
_TURNS = 4  # times that, a step with looks pays for them
_LIFTED = 3  # steps in which everything of a module is looked at after an alert about it
_DEBT = 100  # steps whose earnings looks may owe
_FEW = 20  # steps after which the pace and the cost of the norm are known
_WRITING = 10  # steps in which the records of free looks are written
_MEMORY = 2e9  # nanoseconds over which the work of threads is averaged
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
        self._looks = self._looked = False  # whether this step looks, and the one before
        self._price = self._priced = 0.0  # of the looks of this step, and of the one before
        self._was_free = False  # whether the one before did so for nothing
        self._saved = 0.0  # nanoseconds that steps have earned for looks, and not paid
        self._needed = 0.0  # what has to be saved for the next look
        self._step_ns = 0.0  # what a step takes without tensortap
        self._fixed_ns = 0.0  # what `tracker.step` takes without looks
        self._extra_ns = 0.0  # what the looks of a step add to that
        self._name_ns = 0.0  # the same, usually, of each name
        self._names = 0  # how many names this step looks at
        self._thread_ns = 0.0  # what threads take in a step, on average
        self._ended = self._threads = self._writing = 0
        self._before = 0  # cost of all looks so far
        self._lifted: dict[str, int] = {}  # modules with an alert, and the last step
        self._norm_saved, self._norm_ns, self._norm_spent = 0.0, 0.0, 0
        self._whole_look = float(_UNKNOWN)  # where all is looked at or nothing
        self._whole_looks = 0

    @property
    def everything(self) -> bool:
        """Return whether a step looks at everything or at nothing, as in JAX."""
        return self.names is None

    @property
    def norm_period(self) -> float:
        """Return how many steps pass from one norm of all gradients to the next."""
        if self._begun < _FEW or not self._step_ns:
            return 1.0
        return max(1.0, self._norm_ns / self._for_norm())

    def _earned(self) -> float:
        return _SPENT * self.share * self._step_ns

    def _for_norm(self) -> float:
        earned = self._earned()
        left = (1 - _FOR_LOOKS) * earned - self._fixed_ns - self._thread_ns
        return max(_FOR_NORM * earned, left)

    def _for_looks(self) -> float:
        earned = self._earned()
        norm = min(self._norm_ns, self._for_norm())
        return max(_FOR_LOOKS * earned, earned - self._fixed_ns - self._thread_ns - norm)

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
        self._was_free = bool(self._lifted)
        if self._lifted:
            self._lifted = {name: last for name, last in self._lifted.items() if last >= step}
        self.checks = self._begun < _FEW or self._norm_saved >= self._norm_ns
        self._begun += 1
        self._looked, self._priced, self._price = self._looks, self._price, 0.0
        self._names = len(self.chosen)
        if self.everything:
            self._looks = bool(self._lifted) or whole or self._saved >= self._whole_look
            return self._looks
        if self.chosen:
            self.chosen = {}
        if whole or self._begun >= self._arranging:  # modules and states come and go
            self._arranging += min(self._begun, 1024)
            self.arrange()
        if whole or self._lifted or self._saved >= self._needed > 0:
            self._choose(whole)
        self._looks = bool(self.chosen)
        return self._looks

    def _choose(self, whole: bool) -> None:
        left, price = self._saved - _LOOKING, 0.0
        for turn in list(self._turns):
            if whole or not self._is_lifted(turn):
                cost = self._cost(turn)
                if not whole and (left <= 0 or cost > left):
                    if not self._lifted:
                        break
                    continue
                left, price = left - cost, price + cost
            self._turns.move_to_end(turn)
            self.chosen.update(dict.fromkeys(self._turns[turn]))
        if price:
            self._price = price + _LOOKING
            self._saved -= self._price
        self._tried.update(self.chosen)

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
            cost = self._costs.usual.get(key)
            # what had its turn and was not there costs next to nothing
            total += cost if cost is not None else 0 if key in self._tried else _UNKNOWN
            total += self._name_ns
        return total + (_HOOK if turn.startswith("output") else 0)

    def checked(self, spent: int) -> None:
        """Take what the norm of an optimizer's gradients has cost, in nanoseconds."""
        self._norm_spent += spent

    def end_step(self, now: int, spent: int) -> None:
        """Take the time, and what `tracker.step` has spent, looks excluded; in nanoseconds.

        The next step has begun: installing its hooks is in what was spent.
        """
        looks = self._costs.total - self._before  # and the norm
        self._before = self._costs.total
        threads = pipeline.thread_ns()
        written, self._threads = threads - self._threads, threads
        elapsed, self._ended = now - self._ended, now
        if elapsed == now:
            return
        normed = self._norm_spent
        if self._norm_spent:
            self._norm_ns = usual(self._norm_ns, self._norm_spent)
            self._norm_saved -= self._norm_ns
            self._norm_spent = 0
        self._note_pace(elapsed - looks - spent)
        # what free looks have left to write is free, too
        self._writing = _WRITING if self._lifted else max(0, self._writing - 1)
        if not self._writing:
            part = min(1.0, max(elapsed / _MEMORY, 1 / self._begun))
            self._thread_ns += (written - self._thread_ns) * part
        paid = self._paid_for_everything(elapsed, looks + spent) if self.everything else 0.0
        if not (self._looks or self._looked):
            self._fixed_ns = usual(self._fixed_ns, spent)
        elif not (self._lifted or self._was_free or self.everything):
            self._extra_ns += max(0.0, spent - self._fixed_ns)
            if self._looked:
                # what the scheduler took was no look
                paid += min(looks - normed + self._extra_ns, 2 * self._priced) - self._priced
                each = max(1.0, self._extra_ns - _LOOKING) / self._names
                self._name_ns = usual(self._name_ns, each)
                self._extra_ns = 0.0
        self._norm_saved = min(self._norm_saved + self._for_norm(), 2 * self._norm_ns)
        self._needed = self._whole_look if self.everything else self._next_price()
        most = 100 * self._earned() + self._needed
        saved = max(self._saved + self._for_looks() - paid, -_DEBT * self._earned())
        self._saved = min(saved, most)

    def _note_pace(self, plain: float) -> None:
        """Follow the median of what steps take without us: a pause must not earn hours of looks."""
        if self._begun <= _FEW:  # the first ones compile
            self._step_ns = max(0.0, min(plain, self._step_ns or plain))
        elif not self._looked:
            self._step_ns *= 1.05 if plain > self._step_ns else 0.95

    def _next_price(self) -> float:
        first = self._cost(next(iter(self._turns))) if self._turns else 0.0
        return _LOOKING + max(first, _TURNS * _LOOKING)

    def _paid_for_everything(self, elapsed: int, own: float) -> float:
        """Return what a step with a look takes more than others; compiled code is not measured."""
        if not self._looked:
            return 0.0
        self._whole_looks += 1
        if self._whole_looks <= _FIRST:
            return 0.0
        self._whole_look = max(own, elapsed - self._step_ns)
        return self._whole_look


def _is_whole(number: int) -> bool:
    """Return whether a step looks at everything: 10, 30, 100, 300 and so on.

    >>> [number for number in range(4000) if _is_whole(number)]
    [10, 30, 100, 300, 1000, 3000]
    """
    return number >= 10 and str(number).rstrip("0") in ("1", "3")


def _turn_of(kind: Kind, name: str) -> str:
    return f"{'output' if kind in _OUTPUTS else kind.value} {name}"
