"""The family ``experts``: how routers of mixtures of experts distribute tokens.

A router is recognized by what it has and returns, not by its class: it knows its number of experts,
and returns logits over them together with the experts that it chose. So does a module that has a
number of experts and of choices, and a child with one output per expert.
"""

from __future__ import annotations

import math
import statistics
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensortap.core.record import Kind
from tensortap.rooms.analyses.analysis import (
    Analysis,
    ModuleOutput,
    OutputArray,
)
from tensortap.rooms.analyses.numbers import head_statistics
from tensortap.stats.conversion import as_float64

_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "n_experts")
_CHOICES = ("top_k", "num_experts_per_tok", "experts_per_token", "topk", "k")
_CAPACITY = ("expert_capacity", "capacity", "capacity_factor")


class RouterFacts(NamedTuple):
    """A router of a mixture of experts: number of experts, and how many each token chooses."""

    experts: int
    choices: int
    capacity: int  # if an expert takes so many tokens, and the others are dropped; else 0


class Routing(NamedTuple):
    """The tokens of each expert, and numbers about the logits of their router.

    `dropped` is the share of choices that no expert processes, `load_entropy` is that of the
    tokens per expert, divided by that of an even distribution.
    """

    tokens: NDArray[np.int64]
    dropped: float
    load_entropy: float
    entropy: float
    logit_max: float
    logit_rms: float


def routing(logits: NDArray[np.float64], chosen: NDArray[Any]) -> Routing:
    """Return how tokens are routed.

    `logits` are (token, expert). `chosen` are the experts of each token, of which those outside
    of the range are dropped; or, as booleans, whether an expert processes a token.
    """
    count, experts = logits.shape
    if chosen.dtype == np.bool_:
        tokens, choices = chosen.sum(axis=0), count
    else:
        kept = chosen[(chosen >= 0) & (chosen < experts)]
        tokens, choices = np.bincount(kept.astype(np.int64), minlength=experts), chosen.size
    share = tokens[tokens > 0] / max(tokens.sum(), 1)
    even = math.log(experts) if experts > 1 else 1.0
    finite = logits[np.isfinite(logits)]
    return Routing(
        tokens.astype(np.int64),
        1.0 - float(tokens.sum()) / choices if choices else 0.0,
        -float((share * np.log(share)).sum()) / even,
        float(head_statistics(logits[None, None]).entropy[0]),
        float(np.abs(finite).max(initial=0.0)),
        float(np.sqrt((finite * finite).mean())) if finite.size else math.nan,
    )


class Experts(Analysis):
    """Tokens per expert, share of dropped ones, entropy and size of the logits of routers."""

    def begin(self, model: Any) -> None:
        self._linear: dict[int, RouterFacts] = {}  # by the identity of a module
        self._found: dict[str, list[Routing]] = {}
        self._bounded: set[str] = set()
        for module in model.modules():
            found = _router_facts(module)
            if found.experts and found.choices:
                for child in module.children():
                    if vars(child).get("out_features") == found.experts:
                        self._linear[id(child)] = found

    def output(self, seen: ModuleOutput) -> None:
        linear = self._linear.get(id(seen.module))
        facts = linear or _router_facts(seen.module)
        logits = _logits(seen.arrays, facts.experts) if facts.experts > 1 else None
        if logits is None:
            return
        values = as_float64(logits.array.reshape(-1, facts.experts))
        chosen = _chosen(seen.arrays, facts, len(values))
        if chosen is None:
            if linear is None:
                return  # only its choices would make it a router
            chosen = np.argsort(values, axis=-1, kind="stable")[:, -facts.choices :]
        found = routing(values, chosen)
        self._found.setdefault(logits.name, []).append(found)
        if facts.capacity or found.dropped:
            self._bounded.add(logits.name)

    def end_step(self) -> None:
        for name, calls in self._found.items():
            tokens = np.sum([each.tokens for each in calls], axis=0)
            numbers = {
                "router_entropy": statistics.fmean(each.entropy for each in calls),
                "router_logit_max": max(each.logit_max for each in calls),
                "router_logit_rms": statistics.fmean(each.logit_rms for each in calls),
                "load_entropy": statistics.fmean(each.load_entropy for each in calls),
                "busiest_share": float(tokens.max() / max(tokens.sum(), 1)),
                "idle_experts": int((tokens == 0).sum()),
            }
            if name in self._bounded:
                numbers["dropped_share"] = statistics.fmean(each.dropped for each in calls)
            numbers |= {f"tokens_{i}": int(each) for i, each in enumerate(tokens)}
            self.give(Kind.ACTIVATION, name, numbers)
        self._found.clear()


def _router_facts(module: Any) -> RouterFacts:
    found = (_number(module, names) for names in (_EXPERTS, _CHOICES, _CAPACITY))
    return RouterFacts(*found)


def _number(module: Any, names: tuple[str, ...]) -> int:
    """Return the first of these attributes that is a positive number; 0 if there is none.

    Properties are not read, because they run code of the user.
    """
    for name in names:
        found = vars(module).get(name)
        if isinstance(found, (int, float)) and not isinstance(found, bool) and found > 0:
            return int(found) or 1
    return 0


def _logits(arrays: tuple[OutputArray, ...], experts: int) -> OutputArray | None:
    """Return the first array of floats with one number per expert."""
    for each in arrays:
        if each.array.dtype.kind not in "biucO" and each.array.shape[-1:] == (experts,):
            return each
    return None


def _chosen(
    arrays: tuple[OutputArray, ...], facts: RouterFacts, tokens: int
) -> NDArray[Any] | None:
    """Return the experts of each token, or a matrix that says which expert gets which token."""
    for each in arrays:
        if each.array.dtype.kind not in "biu" or not each.array.ndim:
            continue
        width = each.array.shape[-1]
        if each.array.size != tokens * width:
            continue
        found: NDArray[Any] = each.array.reshape(tokens, width)
        if width == facts.experts != facts.choices and found.max(initial=0) <= 1:
            return found.astype(np.bool_)
        if width <= facts.experts:
            return found
    return None
