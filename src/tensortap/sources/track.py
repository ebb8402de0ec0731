"""`track`: the numerics of a whole model, every step or every n-th."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tensortap.frameworks.registry import framework_named, loaded_frameworks
from tensortap.sources.observer import Observer, TrackOptions

if TYPE_CHECKING:
    import pandas as pd

    from tensortap.alerts import Alert
    from tensortap.record import Record

log = logging.getLogger("tensortap")


_STATES = ("model_state", "optimizer_state", "grads")


class Tracker:
    """A model that is being tracked; made by `track`, for use in a ``with``."""

    def __init__(self, source: Any, observer: Observer) -> None:
        self._source = source  # None when it has ended: a tracker that is kept keeps no model
        self._observer = observer
        self._warned = False

    def __enter__(self) -> Tracker:
        if self._source is None:
            raise RuntimeError("this tracker has ended: call tap.track(...) again")
        self._observer.begin()
        try:
            self._source.attach()
        except BaseException:
            self._end()
            raise
        self._observer.say_unseen()
        return self

    def __exit__(self, *error: object) -> None:
        # whatever was raised goes through: nothing here may take its place
        try:
            self._end()
        except Exception:
            if not error or error[0] is None:
                raise
            log.exception("tensortap: while tracking ended")

    def _end(self) -> None:
        source, self._source = self._source, None
        try:
            if source is not None:
                source.detach()
        finally:
            self._observer.end()

    def step(self, *states: Any, **metrics: Any) -> None:
        """The training step is over, the optimizer has done its work: ``tracker.step(loss=loss)``.

        Weights, their gradients and the optimizer's state are observed now; what comes next
        belongs to the next step. Numbers that are given are kept as training statistics, those
        of steps between every n-th as well. JAX has its states where only the caller knows:
        ``tracker.step(params, opt_state, grads)``.
        """
        from tensortap.pipeline.pipeline import pipeline

        observer = self._observer
        if not observer.active or self._source is None:
            self._say_idle()
            return
        named = {name: metrics.pop(name) for name in _STATES if name in metrics}
        for name, value in metrics.items() if pipeline.enabled else ():
            try:
                observer.metric(name, _number(value))
            except Exception as error:
                pipeline.fault(name, error)
        try:
            self._source.end_step(*states, **named)
        except Exception as error:
            pipeline.fault("tracker.step", error)
        observer.advance()

    def _say_idle(self) -> None:
        """Whoever calls step() believes that something is tracked."""
        if not self._warned:
            self._warned = True
            why = "has not begun" if self._source is not None else "has ended"
            log.warning(
                "tensortap: nothing is tracked, this tracker %s: "
                "with tap.track(...) as tracker: ... tracker.step()",
                why,
            )

    def log(self, metrics: Mapping[str, Any], *, step: int | None = None) -> None:
        """Keep numbers as training statistics: of the step under way, or of an earlier one.

        ``tracker.log({"accuracy": 0.9}, step=40)`` is for what is known only later, and at any
        step, whatever `every` says.
        """
        from tensortap.pipeline.pipeline import pipeline

        if pipeline.enabled and self._observer.active:
            for name, value in metrics.items():
                try:
                    self._observer.metric(str(name), _number(value), step)
                except Exception as error:
                    pipeline.fault(name, error)

    @property
    def on(self) -> bool:
        """Whether the step that is under way is tracked, as `every` says."""
        return self._observer.on

    def intercept(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function of JAX and observe what happens inside: activations and gradients."""
        if self._source is None:
            return function(*args, **kwargs)
        call = getattr(self._source, "intercept", None)
        if call is None:
            raise TypeError("intercept is for JAX: of a torch model everything is seen by hooks")
        return call(function, *args, **kwargs)

    @property
    def unseen(self) -> dict[str, str]:
        """What cannot be observed, and why."""
        return dict(self._observer.unseen)

    @property
    def records(self) -> Iterator[Record]:
        """All records so far, in the order of capture."""
        return self._observer.records

    @property
    def alerts(self) -> list[Alert]:
        """The alerts so far."""
        return self._observer.alerts

    def logframe(self, exponents: tuple[int, int] | None = None) -> pd.DataFrame:
        """The statistics as a frame: metadata, scalar_stats, exponent_counts."""
        from tensortap.table.frames import logframe_of

        return logframe_of(self.records, exponents=exponents)

    def metrics(self) -> pd.DataFrame:
        """The numbers that were given to `step()`: a row a step."""
        from tensortap.table.frames import metrics_of

        return metrics_of(self.records)


def _number(value: Any) -> float:
    detach = getattr(value, "detach", None)
    return float(value if detach is None else detach())


def track(
    module: Any = None,
    optimizer: Any = None,
    *,
    model_state: Any = None,
    optimizer_state: Any = True,
    **options: Any,
) -> Tracker:
    """Track a model: ``with tap.track(model, optimizer=opt) as tracker: … tracker.step()``.

    Statistics of every module's output and its gradient, of weights and their gradients and of
    the optimizer's state become records: in the run, the live session, `tracker.records`.

    `include` and `exclude` are regular expressions over names, or a dict of them by kind
    (``{"gradients": r"attn"}``). `activations`, `gradients`, `weights`, `optimizer_state` switch
    kinds off. `every` tracks each n-th step. `tensors` is a pattern (or True): those are kept
    whole as well. `stash` is a function of a tensor whose numbers become extra statistics.
    `only_training` passes over what happens in ``model.eval()``. `init_step` is the first step:
    0, or where the open run stands.
    `alerts` is True or a list of rules, `on_alert` a function, "stop" or "keep".

    For JAX: ``tap.track(model_state=params, optimizer_state=opt_state)``, then
    ``tracker.intercept(update, …)`` and ``tracker.step(params, opt_state, grads)``.
    """
    jax = model_state is not None or not isinstance(optimizer_state, bool)
    wanted = optimizer_state is not False and optimizer_state is not None
    observer = Observer(settings_of({**options, "optimizer_state": wanted}))
    if jax:
        if module is not None:
            raise TypeError("track a torch module, or model_state= of JAX, not both")
        state = None if isinstance(optimizer_state, bool) else optimizer_state
        if observer.settings.stash is not None or observer.settings.tensors:
            observer.unseen["inside compiled functions"] = (
                "stash and tensors see states only; use tap.catch inside the function"
            )
        hooks = framework_named("jax").track(model_state, state, observer)
        assert hooks is not None
        return Tracker(hooks, observer)
    for framework in loaded_frameworks():
        hooks = framework.track(module, optimizer, observer)
        if hooks is not None:
            return Tracker(hooks, observer)
    raise TypeError(f"track a torch.nn.Module, or model_state= of JAX, not {module!r:.100}")


def settings_of(options: Mapping[str, Any]) -> TrackOptions:
    """The options of `track`; one that there is not is said."""
    unknown = ", ".join(sorted(set(options) - set(TrackOptions._fields)))
    if unknown:
        raise TypeError(f"track has no {unknown}; there are {', '.join(TrackOptions._fields)}")
    return TrackOptions(**options)
