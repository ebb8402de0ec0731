"""Rules over schedulers, gradient clipping, loss scaling and dtypes."""

from __future__ import annotations

from typing import Any

from tensortap import ranks
from tensortap.alerts.alert import HINT
from tensortap.alerts.rules import Rule
from tensortap.alerts.steps import MODEL, Found, in_a_row, listed, of_steps
from tensortap.arguments import check_count, checked
from tensortap.frameworks.steps import PrecisionFacts, StepFacts

_SMALL_DROP, _LARGE_DROP = 20, 3  # how many equal drops of a rate are many; large: by half or more
_FALL = 50.0
_EARLY = 300  # steps
_SCHEDULER = "scheduler"
_NOT_UNSCALED = 10.0  # factors of clipping, times the scale, when scaled gradients are clipped


@checked
def scheduler_order(patience: int = 3) -> Rule:
    """Report a scheduler that is stepped before the optimizer, or several times per step."""
    check_count("patience", patience)

    def check(facts: StepFacts, state: dict[str, Any]) -> Found:
        schedule = facts.schedule
        state["first"] = state.get("first") or schedule.skipped_first
        if facts.optimizer_steps:
            world_size = ranks.rank_and_world_size()[1]  # accelerate steps once for each rank
            often = (schedule.steps or 0) > 1 and schedule.steps != world_size
            if in_a_row(state, "often", often):
                state["steps"] = schedule.steps
            in_a_row(state, "early", schedule.early)
        if state.get("often", 0) >= patience:
            message = (
                f"the scheduler is stepped {state['steps']} times for each step of the optimizer; "
                "call scheduler.step() once after optimizer.step()"
            )
            yield _SCHEDULER, message
        elif state.get("early", 0) >= patience or state["first"]:
            message = (
                "the scheduler is stepped before the optimizer, so the first learning rate is left "
                "out; call scheduler.step() after optimizer.step()"
            )
            yield _SCHEDULER, message

    return of_steps(check, "scheduler_order")


def scheduler_per_batch() -> Rule:
    """Give a hint if a learning rate falls far too early, or a cosine schedule begins to rise.

    Falling means 50-fold by equal factors within the first 300 steps.
    """

    def check(facts: StepFacts, state: dict[str, Any]) -> Found:
        if not facts.optimizer_steps:
            return
        steps = in_a_row(state, "steps", True)
        if facts.schedule.overrun is not None:
            message = (
                f"the cosine schedule has a length of {facts.schedule.overrun} (T_max) and is "
                "stepped beyond it, where the learning rate rises again: is it stepped per batch "
                "instead of per epoch?"
            )
            yield _SCHEDULER, message
        for group in facts.groups:
            name = f"learning rate of group {group.number}"
            last, first, factor, drops = state.get(name, (group.rate, group.rate, 0.0, 0))
            if 0.0 < group.rate < 0.999 * last and steps <= _EARLY:
                ratio = group.rate / last
                same = abs(ratio - factor) < 1e-6 * ratio
                first, drops = (first, drops + 1) if same else (last, 1)
                factor = ratio
            state[name] = group.rate, first, factor, drops
            many = _LARGE_DROP if factor <= 0.5 else _SMALL_DROP
            if drops >= many and first >= _FALL * group.rate:
                message = (
                    f"it fell from {first:.3g} to {group.rate:.3g} in {drops} equal drops within "
                    f"{steps} steps: is the scheduler stepped per batch instead of per epoch?"
                )
                yield name, message

    return of_steps(check, "scheduler_per_batch", HINT)


@checked
def clipping(patience: int = 10) -> Rule:
    """Give a hint if gradient clipping acts in each of `patience` checked steps, in none, or late.

    Late means after the step of the optimizer.
    """
    check_count("patience", patience)

    def check(facts: StepFacts, state: dict[str, Any]) -> Found:
        if in_a_row(state, "late", facts.changed_late) >= patience:
            message = "gradients are changed after the optimizer has used them, and then zeroed"
            yield MODEL, f"{message}: clip them between backward() and step()"
        factors: list[float] = state.setdefault("factors", [])
        scaled, scale = facts.schedule.scaled, facts.schedule.scale
        if facts.rescaled is not None and (scale is not None or not scaled):
            factors.append(facts.rescaled * (scale if scaled and scale else 1.0))
            del factors[:-patience]
        if len(factors) < patience:
            return
        low, high = min(factors), max(factors)
        state["scaled"] = state.get("scaled") or scaled  # which multiplies without clipping, too
        if low > 0.999 and not state["scaled"]:
            message = f"gradient clipping did not act in the last {patience} checked steps"
            yield MODEL, f"{message}: is its threshold as intended?"
        elif high < 0.999 and high > 1.001 * low:  # a constant factor is no clipping
            message = (
                f"gradient clipping acted in each of the last {patience} checked steps, by factors "
                f"from {low:.2g} to {high:.2g}: the threshold decides on the size of the updates"
            )
            if scaled and scale and high * scale < _NOT_UNSCALED:
                message += "; call scaler.unscale_(optimizer) before clipping"
            yield MODEL, message

    return of_steps(check, "clipping", HINT)


@checked
def scale_falls(patience: int = 5) -> Rule:
    """Report a loss scale that is below 1, or has fallen in `patience` checked steps in a row."""
    check_count("patience", patience)

    def check(facts: StepFacts, state: dict[str, Any]) -> Found:
        scale = facts.schedule.scale
        if scale is not None:
            in_a_row(state, MODEL, scale < state.get("scale", 0.0))
            state["scale"] = scale
        if state.get(MODEL, 0) >= patience or state.get("scale", 1.0) < 1.0:
            message = (
                f"the scale of the loss has fallen to {state['scale']:.3g}, because gradients keep "
                "overflowing: look for what is infinite, or use bfloat16"
            )
            yield MODEL, message

    return of_steps(check, "scale_falls")


def _of_dtypes(facts: StepFacts, state: dict[str, Any], holds: bool) -> int:
    """Return for how many checked steps in a row a condition has held."""
    if facts.precision is not None:
        in_a_row(state, MODEL, holds)
    count: int = state.get(MODEL, 0)
    return count


_AUTOCAST = {  # by where it is active
    "": "a GradScaler scales the loss, but all layers compute in float32: run the forward pass in "
    "torch.autocast(..., dtype=torch.float16), or leave the scaler out",
    "after": "autocast is active in the backward pass or the optimizer's step, but not in the "
    "forward pass, so all layers compute in float32: call the model in torch.autocast(...)",
    "forward": "autocast is active where the model is called, but all of its layers compute in "
    "float32: does the model switch autocast off?",
}


@checked
def no_autocast(patience: int = 3) -> Rule:
    """Report autocast, or a GradScaler, that is used although nothing is computed in 16 bits."""
    check_count("patience", patience)

    def check(facts: StepFacts, state: dict[str, Any]) -> Found:
        found = facts.precision
        state["scaled"] = state.get("scaled") or facts.schedule.scaled
        idle = found is not None and found.stored_in_float32 and bool(found.full) and not found.low
        if found is not None and found.autocast:
            state["where"] = found.autocast
        asked = bool(state["scaled"] or (found is not None and found.autocast))
        if _of_dtypes(facts, state, asked and idle) >= patience:
            yield MODEL, _AUTOCAST[state.get("where", "")]

    return of_steps(check, "no_autocast")


@checked
def wide_layers(patience: int = 3) -> Rule:
    """Give a hint about layers that compute in float32 among others in 16 bits, or in float64."""
    check_count("patience", patience)

    def check(facts: StepFacts, state: dict[str, Any]) -> Found:
        found: PrecisionFacts | None = facts.precision
        mixed = found is not None and bool(found.full and found.low)
        if found is not None and (mixed or found.double):
            layers = f"{listed(found.full)} compute in float32, others in 16 bits"
            state["what"] = "the model returns float64" if found.double else layers
        wide = found is not None and (mixed or found.double)
        if _of_dtypes(facts, state, wide) >= patience:
            yield MODEL, f"{state['what']}: is it meant so?"

    return of_steps(check, "wide_layers", HINT)


RATE_RULES: tuple[Rule, ...] = (
    clipping(), no_autocast(), scale_falls(), scheduler_order(), scheduler_per_batch(),
    wide_layers(),
)  # fmt: skip
