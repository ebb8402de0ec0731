"""`track`: record the numerics of a whole model, at every step or every n-th."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensortap.capture.pipeline import pipeline
from tensortap.core.arguments import check_count, checked
from tensortap.core.probes import probes
from tensortap.core.record import Kind
from tensortap.core.rooms import offer, offers
from tensortap.rooms.track.observer import Observer
from tensortap.rooms.track.options import KindChoice, NamePattern, Stash, TrackOptions
from tensortap.rooms.track.probing import Probing
from tensortap.values.registry import parts

if TYPE_CHECKING:
    import pandas as pd

    from tensortap.alerts import Alert
    from tensortap.core.record import Record

log = logging.getLogger("tensortap")

_STATES = ("model_state", "optimizer_state", "grads")


class Tracker:
    """A model that is being tracked; made by `track`, used in a ``with`` statement."""

    def __init__(self, model: Any, hooks: Any, observer: Observer) -> None:
        self._hooks = hooks  # None after the end, so that the tracker keeps no model alive
        self._observer = observer
        if observer.plan.budget is not None and hasattr(hooks, "select"):
            observer.plan.budget.names = self._names
        self._attached = False  # hooks cost time, so an idle tracker has none
        self._probing = Probing(model, hooks, observer)
        self._warned = False

    def _names(self) -> list[tuple[Kind, str]]:
        wanted = self._observer.could_want
        names = [] if self._hooks is None else self._hooks.names
        return [(kind, name) for kind, name in names if wanted(kind, name)]

    def __enter__(self) -> Tracker:
        if self._hooks is None:
            raise RuntimeError("this tracker has ended: call tap.track(...) again")
        self._observer.begin()
        try:
            self._follow()
        except BaseException:
            self._end()
            raise
        probes.add(self._probing)
        self._observer.report_unseen()
        return self

    def _follow(self) -> None:
        """Have hooks where the plan looks; those that are compiled into graphs stay."""
        plan, hooks = self._observer.plan, self._hooks
        wanted, is_plain = not plan.idle, plan.is_plain
        if not wanted and not is_plain:
            wanted = getattr(hooks, "in_graphs", False)
        if wanted is not self._attached:
            self._attached = wanted
            hooks.attach() if wanted else hooks.detach()
        if wanted and (plan.changed or not is_plain) and hasattr(hooks, "select"):
            plan.changed = False
            hooks.select(self._observer.takes_values)

    def __exit__(self, *error: object) -> None:
        try:
            self._end()
        except Exception:
            if not error or error[0] is None:  # else the user's exception goes first
                raise
            log.exception("tensortap: error while ending a tracker")

    def _end(self) -> None:
        hooks, self._hooks = self._hooks, None
        probes.remove(self._probing)
        self._probing.close()
        try:
            if hooks is not None and self._attached:
                hooks.detach()
        finally:
            self._observer.end()

    def step(self, *states: Any, **metrics: Any) -> None:
        """End the training step, after the optimizer's step: ``tracker.step(loss=loss)``.

        Records weights, their gradients and the optimizer's state. Keyword arguments are numbers
        about the step; they are recorded at every step, whatever `every` is. A JAX program passes
        its states: ``tracker.step(params, opt_state, grads)``.
        """
        observer = self._observer
        if not observer.active or self._hooks is None:
            self._warn_inactive()
            return
        start, budget = time.perf_counter_ns(), observer.plan.budget
        looks = observer.costs.total
        named = {name: metrics.pop(name) for name in _STATES if name in metrics}
        if metrics:
            self._log(metrics)
        try:
            if self._attached:
                self._hooks.end_step(*states, **named)
        except Exception as error:
            pipeline.fault("tracker.step", error)
        observer.advance()
        try:
            self._follow()
            self._probing.end_step()
            if budget is not None:
                now = time.perf_counter_ns()
                budget.end_step(now, now - start - (observer.costs.total - looks))
        except Exception as error:
            pipeline.fault("tracker.switch", error)

    @checked
    def switch(self, every: int) -> None:
        """Record each n-th step from the next one on; 0 removes all hooks until the next switch."""
        check_count("every", every, 0)
        self._observer.switch(every)

    def _warn_inactive(self) -> None:
        if not self._warned:
            self._warned = True
            reason = "has not begun" if self._hooks is not None else "has ended"
            log.warning(
                "tensortap: nothing is tracked, because this tracker %s: "
                "with tap.track(...) as tracker: ... tracker.step()",
                reason,
            )

    @checked
    def log(self, metrics: Mapping[str, Any], *, step: int | None = None) -> None:
        """Record numbers about the current step, or about an earlier one.

        ``tracker.log({"accuracy": 0.9}, step=40)`` serves numbers that are known only later.
        """
        self._log(metrics, step)

    def _log(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        if pipeline.enabled and self._observer.active:
            for name, value in metrics.items():
                try:
                    detach = getattr(value, "detach", None)
                    number = float(value if detach is None else detach())
                    self._observer.metric(str(name), number, step)
                except Exception as error:
                    pipeline.fault(name, error)

    @property
    def on(self) -> bool:
        """Whether `every` selects the current step."""
        return self._observer.on

    def intercept(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a JAX function and record the activations and gradients inside it."""
        if self._hooks is None:
            return function(*args, **kwargs)
        intercept = getattr(self._hooks, "intercept", None)
        if intercept is None:
            raise TypeError("intercept is for JAX; hooks observe everything in a torch model")
        return intercept(function, *args, **kwargs)

    @property
    def unseen(self) -> dict[str, str]:
        """Modules and values that cannot be observed, or only with a side effect, and why."""
        return self._prefixed(self._observer.unseen)

    @property
    def remarks(self) -> dict[str, str]:
        """Notes on observed names, by name, such as that a function runs twice."""
        return self._prefixed(self._observer.remarks)

    def _prefixed(self, reasons: dict[str, str]) -> dict[str, str]:
        return {self._observer.prefix + name: reason for name, reason in reasons.items()}

    @property
    def records(self) -> list[Record]:
        """The records so far: from the run that took them, else from memory.

        Memory holds the latest 128 MiB; `evicted` counts what left it. Whole tensors that a live
        session has taken are only there.
        """
        return list(self._observer.records)

    @property
    def evicted(self) -> int:
        """Number of records evicted from the memory of the tracker."""
        return self._observer.sent.memory.evicted

    @property
    def alerts(self) -> list[Alert]:
        """The alerts so far."""
        return list(self._observer.alerting.alerts)

    @property
    def hints(self) -> list[Alert]:
        """The hints so far: findings that may be intended."""
        return list(self._observer.alerting.hints)

    @property
    def path(self) -> Path | None:
        """The folder of the run that takes the records; None if there is none."""
        run = self._observer.sent.run
        return None if run is None else run.path

    def logframe(
        self, exponents: tuple[int, int] | None = None, *, strict: bool = False
    ) -> pd.DataFrame:
        """Return the statistics as a frame: metadata, scalar_stats, exponent_counts.

        `strict` is for readers that allow no further metadata: see `run.logframe`.
        """
        records = self._observer.records
        return offer("run.logframe")(records, exponents=exponents, strict=strict)

    def metrics(self) -> pd.DataFrame:
        """Return the numbers that were passed to `step` and `log`, one row per step."""
        from tensortap.table.frames import metrics_of

        return metrics_of(self._observer.records)


@checked
def track(
    model: Any = None,
    optimizer: Any = None,
    *,
    include: NamePattern = None,
    exclude: NamePattern = None,
    kind: KindChoice = None,
    every: int = 1,
    budget: str | float | None = None,
    tensors: bool | str | re.Pattern[str] = False,
    stash: Stash | None = None,
    digests: bool = False,
    alerts: Any = False,
    on_alert: Any = None,
    name: str | None = None,
    to: str | Path | None = None,
    only_training: bool = True,
    init_step: int | None = None,
    **of_rooms: Any,
) -> Tracker:
    """Track a model: ``with tap.track(model, optimizer) as tracker: … tracker.step()``.

    Records the statistics of every module's output and its gradient, of weights, their gradients
    and the optimizer's state, in the run, the live session and `tracker.records`.

    - `include`, `exclude`: regular expressions over names, or a dict of them by kind
      (``{"gradient": r"attn"}``)
    - `kind`: one or several of ``"activation"``, ``"gradient"``, ``"weight"``,
      ``"weight_gradient"``, ``"optimizer_state"`` (by default these), and ``"input"``, the tensors
      that each module is called with; ``"all"`` is everything
    - `every`: select each n-th step; with 0, nothing is recorded until `tracker.switch`
    - `budget`: look at tensors in turns, so that it costs no more than this share of the time:
      ``"1%"``
    - `tensors`: a pattern, or True, for tensors to keep whole
    - `stash`: a function of a tensor that returns a dict of extra statistics
    - `digests`: add a digest to every record, by which `tap.compare` tells whether tensors have the
      same bits
    - `alerts`: True, or a list of rules or their names
    - `on_alert`: a function, ``"stop"`` or ``"keep"``
    - `name`: put before all names; patterns do not see it
    - `to`: a folder for a run of this tracker, in programs without `tap.init`
    - `only_training`: False also records ``model.eval()``
    - `init_step`: the first step, by default 0 or where the open run is
    - options of rooms, such as `analyses`: True, or a list of families such as ``["norms"]``,
      numbers about each step of a torch model

    For JAX: ``tap.track(params, opt_state)``, then ``tracker.intercept(update, …)`` and
    ``tracker.step(params, opt_state, grads)``.
    """
    observer = Observer(TrackOptions(
        include, exclude, kind, every, budget, tensors, stash, digests, alerts, on_alert, name, to,
        only_training, init_step, of_rooms,
    ))  # fmt: skip
    for part in parts("tensortap.rooms.track"):
        hooks = part.hooks_of(model, optimizer, observer)
        if hooks is not None:
            for wrapped in offers("track.hooks"):
                hooks = wrapped(hooks, model, observer)
            return Tracker(model, hooks, observer)
    if hasattr(model, "param_groups"):
        swapped = hasattr(optimizer, "forward")
        what = "model and optimizer are swapped" if swapped else "the model is missing"
        raise TypeError(f"{what}: tap.track(model, optimizer)")
    got = type(model).__name__
    raise TypeError(
        f"model must be a torch.nn.Module, or the parameters of a JAX program; got {got}"
    )


def check_track_options(options: Mapping[str, Any]) -> None:
    """Raise for options that `track` does not have, or that make no sense."""
    own = {name: value for name, value in options.items() if name in TrackOptions._fields[:-1]}
    of_rooms = {name: value for name, value in options.items() if name not in own}
    Observer(TrackOptions(**own, of_rooms=of_rooms))
