"""Judge what a program computes from the reference's inputs, and find whose fault a difference is.

Everything that the program computes is compared with what the reference recorded, and replaced by
it. So each difference is made where it shows: the output of a module by the module, its inputs by
the module around it, the gradient of an output by the modules that read the output.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from tensortap.core.errors import NotFound
from tensortap.core.record import Kind
from tensortap.rooms.bisect.faulty_modules import (
    BATCH,
    GRADIENTS,
    LOSS,
    OPTIMIZER,
    BisectReport,
    FaultyModule,
)
from tensortap.rooms.bisect.grafting import CallSite, GraftSource, Swap
from tensortap.rooms.bisect.recorded_step import RecordedStep
from tensortap.rooms.compare.result import Comparison
from tensortap.rooms.compare.tensors import Tolerance
from tensortap.rooms.compare.values import compare_with
from tensortap.rooms.reasons.explain import explain
from tensortap.values.view import array_of

_SAME_FACTOR = 1e-3  # factors that are closer than this, relative to each other, are the same
_NO_INPUTS = (
    'the reference has no inputs of modules: record it with tap.track(..., kind="all") to tell a '
    "module from the code before it"
)
_PLURALS = {
    Kind.ACTIVATION: "outputs",
    Kind.GRADIENT: "gradients of outputs",
    Kind.WEIGHT_GRADIENT: "gradients of weights",
    Kind.WEIGHT: "weights after the step",
    Kind.OPTIMISER_STATE: "tensors of optimizer state",
}


class Deviation(NamedTuple):
    """A tensor that differs from the recorded one, and who may have made the difference."""

    kind: Kind
    what: str
    suspects: tuple[str, ...]
    comparison: Comparison
    explanations: tuple[str, ...] = ()
    factor: float | None = None  # of a gradient that is a multiple of the recorded one
    before: bool = False  # a weight before the step
    is_missing: bool = False
    unchanged: bool = False  # a weight that the step has not changed


class Judge(GraftSource):
    """Compares every tensor of a step with the recorded one."""

    def __init__(
        self, recorded: RecordedStep, tolerance: Tolerance, before: GraftSource | None = None
    ) -> None:
        super().__init__(recorded)
        self._tolerance = tolerance
        self._before = before  # what the program started from
        self._counts: collections.Counter[str] = collections.Counter()
        self._found: list[Deviation] = []
        # calls of modules that draw random numbers, and whether their output agrees
        self._random: list[tuple[str, bool]] = []
        self._cut_off: set[str] = set()  # modules whose outputs have no gradient

    def swap(self, swap: Swap) -> None:
        """Compare a tensor with the recorded one, which takes its place."""
        if not swap.before and not (swap.kind is Kind.GRADIENT and swap.computed is None):
            self._counts["inputs" if swap.is_input else _PLURALS[swap.kind]] += 1
        if swap.kind is Kind.GRADIENT and swap.computed is None and swap.site is not None:
            self._cut_off.add(swap.site.module)
        if swap.computed is None:
            found = Comparison(False, "it has no gradient, the reference has one", differing=1)
        else:
            found = compare_with(swap.computed, swap.recorded, self._tolerance)
        if swap.random and not swap.is_input and swap.site is not None:
            self._random.append((swap.site.module, bool(found)))
        if not found:
            self._found.append(self._deviation(swap, found))

    def _deviation(self, swap: Swap, found: Comparison) -> Deviation:
        reasons: tuple[str, ...] = ()
        factor = None
        if swap.computed is not None:
            atol, rtol, *_ = self._tolerance
            reasons = tuple(map(str, explain(swap.computed, swap.recorded, atol=atol, rtol=rtol)))
        if swap.kind is Kind.WEIGHT_GRADIENT and swap.computed is not None:
            factor = _factor(swap.computed, swap.recorded, self._tolerance)
        return Deviation(
            swap.kind, _what(swap), _suspects(swap), found, reasons, factor, swap.before,
            swap.computed is None, swap.unchanged,
        )  # fmt: skip

    def raised(self, module: str, words: str) -> None:
        """Note a module whose error has ended the step."""
        comparison = Comparison(False, words, differing=1)
        self._found.append(Deviation(Kind.ACTIVATION, "no output", (module,), comparison))
        self.notes[f"what follows the error in {module} was not judged"] = None

    # -- whose fault it is -----------------------------------------------------------------------

    def report(self, reference: str) -> BisectReport:
        """Return all faulty modules; raise NotFound if nothing could be judged."""
        if not self._counts and not self._found:
            reasons = ["the step calls no module that the run recorded"]
            reasons = [f"{key}: {why}" for key, why in self.unjudged.items()][:1] or reasons
            raise NotFound(f"nothing was judged: {reasons[0]}; mapping= renames modules")
        forward = [each for each in self._found if each.kind is Kind.ACTIVATION]
        unsure = self._unsure()
        faults = _merged(each for each in forward if each.suspects[0] not in unsure)
        doubtful = _merged(each for each in forward if each.suspects[0] in unsure)
        explained = unsure | _named(faults)
        if BATCH in explained:
            explained.add(LOSS)  # the labels belong to the batch
        faults += _merged(
            each for each in self._found if each.before and not explained & set(each.suspects)
        )
        cut = [each for each in self._found if each.kind is Kind.GRADIENT and each.is_missing]
        faults += _merged(
            each for each in cut if each.suspects and not explained & set(each.suspects)
        )
        explained |= _named(faults)
        if cut:
            explained |= self._cut_off
        kinds = (Kind.GRADIENT, Kind.WEIGHT_GRADIENT)
        backward = [
            each for each in self._found
            if each.kind in kinds and each not in cut and not explained & set(each.suspects)
        ]  # fmt: skip
        faults += _merged(self._without_common_factor(backward, bool(faults)))
        explained |= _named(faults)
        faults += self._optimizer(explained)
        if not self._recorded.has_inputs:
            self.notes[_NO_INPUTS] = None
        if doubtful:
            self.notes[
                "unsure: these modules draw random numbers; start both programs from the same "
                "random state to judge them"
            ] = None
        return BisectReport(
            reference, self._recorded.step, tuple(faults), tuple(doubtful), dict(self._counts),
            self.unjudged, tuple(self.notes),
        )  # fmt: skip

    def _unsure(self) -> set[str]:
        """Return the modules that may differ only because the random states do.

        A call is judged where the random states agree: the call before it agrees, or a later one.
        """
        found = set()
        for index, (module, agrees) in enumerate(self._random):
            before = index > 0 and self._random[index - 1][1]
            later = any(each for _, each in self._random[index + 1 :])
            if not agrees and not before and not later:
                found.add(module)
        return found

    def _without_common_factor(
        self, found: list[Deviation], has_faults: bool
    ) -> Iterator[Deviation]:
        """Replace gradients that differ by one factor by one difference: they are all scaled.

        Where something else is faulty, clipping by the norm of all gradients explains the factor.
        """
        weights = [each for each in found if each.kind is Kind.WEIGHT_GRADIENT]
        factors = [each.factor for each in weights if each.factor is not None]
        median = float(np.median(factors)) if factors else 0.0
        scaled = [
            each for each in weights if each.factor is not None
            and abs(each.factor - median) <= _SAME_FACTOR * abs(median)
        ]  # fmt: skip
        others = has_faults or len(scaled) < len(found)
        if len(scaled) < 2 or len(scaled) < self._counts[_PLURALS[Kind.WEIGHT_GRADIENT]] / 2:
            yield from found
            return
        kept = [each for each in found if each not in scaled]
        yield from kept
        words = f"all gradients are {median:.6g} times those recorded"
        if others:
            self.notes[f"{words}: clipping by their norm explains it, as others differ"] = None
        else:
            yield scaled[0]._replace(suspects=(GRADIENTS,), what=words, explanations=())

    def _optimizer(self, faulty: set[str]) -> list[FaultyModule]:
        """Return the fault of the optimizer, judged by the parameters of modules without fault."""
        # whether all weights before the step are those of the reference
        known = self._before is not None and not self._before.unjudged
        found = [
            each for each in self._found
            if each.kind in (Kind.WEIGHT, Kind.OPTIMISER_STATE) and not each.before
            and (known or each.kind is not Kind.WEIGHT
                 or not faulty & set(each.suspects))
        ]  # fmt: skip
        # if it updates others, it is not what keeps a weight as it was
        stale = [each for each in found if each.unchanged]
        if stale and len(stale) < self._counts[_PLURALS[Kind.WEIGHT]] / 2:
            found = [each for each in found if each not in stale]
            owned = _merged(each._replace(what=f"{each.what}, which has not changed it")
                            for each in stale)  # fmt: skip
        else:
            owned = []
        if not found:
            return owned
        states = any(each.kind is Kind.OPTIMISER_STATE for each in found)
        hint = "its state differs" if states else "its state agrees: look at lr, eps, weight decay"
        what = f"{found[0].what}; {hint}"
        return owned + _merged(each._replace(suspects=(OPTIMIZER,), what=what) for each in found)


def _named(faults: Iterable[FaultyModule]) -> set[str]:
    return {name for each in faults for name in (each.module, *each.others)}


def _what(swap: Swap) -> str:
    """Return in words what a tensor is."""
    call = f", call {swap.site.call + 1}" if swap.site is not None and swap.site.call else ""
    if swap.is_input:
        module, _, which = swap.name.rpartition(".input")
        return f"input {which} of {module}{call}"
    if swap.kind is Kind.GRADIENT:
        return f"gradient of the output of {swap.name}{call}"
    if swap.kind is Kind.WEIGHT_GRADIENT:
        return f"gradient of {swap.name}"
    if swap.kind is Kind.WEIGHT:
        return f"{swap.name} {'before' if swap.before else 'after'} the step"
    if swap.kind is Kind.OPTIMISER_STATE:
        return f"state {swap.name}"
    path = swap.name.removeprefix(swap.site.module) if swap.site is not None else ""
    return f"output {path}{call}".replace(" ,", ",").strip()


def _suspects(swap: Swap) -> tuple[str, ...]:
    """Return who may have made a difference, the most likely one first."""
    site = swap.site
    if swap.kind is not Kind.ACTIVATION:
        owners = swap.readers()
        if swap.kind is Kind.GRADIENT and swap.computed is None:
            return owners
        return owners or (LOSS if swap.kind is Kind.GRADIENT else GRADIENTS,)
    assert site is not None
    if swap.is_input:
        site = site.parent
        if site is None:
            return (BATCH,)
    others = () if swap.certain else (_around(site),)
    return (site.module, *others)


def _around(site: CallSite) -> str:
    return BATCH if site.parent is None else site.parent.module


def _factor(computed: Any, recorded: Any, tolerance: Tolerance) -> float | None:
    """Return the number by which all of a recorded tensor was multiplied; None if there is none."""
    found = array_of(computed), array_of(recorded)
    if found[0] is None or found[1] is None or found[0].shape != found[1].shape:
        return None
    one, other = (each.astype(np.float64) for each in found if each is not None)
    norm = float((other * other).sum())
    factor = float((one * other).sum()) / norm if norm else 0.0
    if not factor or not np.isfinite(factor):
        return None
    close = tolerance._replace(rtol=max(tolerance.rtol, _SAME_FACTOR))
    scale = float(abs(other).max()) * _SAME_FACTOR
    return factor if compare_with(one / factor, other, close._replace(atol=scale)) else None


def _merged(found: Iterable[Deviation]) -> list[FaultyModule]:
    """Return one fault per module: its first difference, and how many there are."""
    faults: dict[str, FaultyModule] = {}
    for each in found:
        module, *others = each.suspects
        known = faults.get(module)
        if known is not None:
            faults[module] = dataclasses.replace(known, count=known.count + 1)
            continue
        phase = "forward" if each.kind is Kind.ACTIVATION else "backward"
        if module == OPTIMIZER:
            phase = "optimizer"
        faults[module] = FaultyModule(
            module, phase, each.what, each.comparison, tuple(others), each.explanations
        )
    return list(faults.values())
