"""The probes of a tracker, and what a session may change of them while the program trains."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tensortap.core.errors import MissingRoom, TensortapError
from tensortap.core.probes import Probe, ProbeRequest
from tensortap.core.record import Kind
from tensortap.core.rooms import offer
from tensortap.rooms.track.observer import Observer


class Probing:
    """Shows the names of a tracked model, and carries out requests between two steps."""

    def __init__(self, model: Any, hooks: Any, observer: Observer) -> None:
        self._model, self._hooks, self._observer = model, hooks, observer
        # until which step, the path that is traced, and what ends it
        self._open: list[tuple[int, str, contextlib.ExitStack]] = []

    def probes(self) -> Iterator[Probe]:
        plan, costs, prefix = self._observer.plan, self._observer.costs, self._observer.prefix
        for kind, name in self._names():
            setting = plan.setting(kind, name)
            seen, spent = costs.get((kind, name), (0, 0))
            yield Probe(prefix + name, kind.value, setting.every, setting.tensors, seen, spent)
        for name in self._functions():
            traced = any(pattern.startswith(f"{name}.") for _, pattern, _ in self._open)
            yield Probe(prefix + name, "Function", int(traced))

    def _functions(self) -> Iterator[str]:
        """Yield the functions of the model whose local variables can be traced, by their paths."""
        for path, module in getattr(self._model, "named_modules", lambda: ())():
            written_in = getattr(type(module), "__module__", "")
            if not written_in.startswith("torch.") and hasattr(type(module), "forward"):
                yield f"{path}.forward" if path else "forward"

    def _names(self) -> list[tuple[Kind, str]]:
        known = [(Kind(kind), name) for kind, name in list(self._observer.costs)]
        found = dict.fromkeys(getattr(self._hooks, "names", ()))  # in the order of the model
        found.update(dict.fromkeys(known))
        return [each for each in found if each[0] in self._observer.kinds]

    def change(self, request: ProbeRequest, step: int) -> str:
        if request.action in ("trace", "ops"):
            return self._open_for_steps(request, step)
        if request.action == "rules":
            names = [name.strip() for name in request.pattern.split(",") if name.strip()]
            self._observer.change_rules(names)
            return f"rules: {', '.join(names) or 'none'}"
        if request.action == "reset":
            self._observer.plan.change(request, step)
            return "as the program says"
        matching = self._matching(request)
        # modules in JAX are known once they were seen
        if not matching and hasattr(self._hooks, "select"):
            return ""
        if request.every and self._needs_graphs() and not request.recompile:
            raise TensortapError(
                "the model is compiled without probes; recompile=True compiles it anew with them"
            )
        self._observer.plan.change(request, step)
        return f"{matching} probes {'off' if not request.every else f'every {request.every} steps'}"

    def _matching(self, request: ProbeRequest) -> int:
        from tensortap.core.patterns import TypedPattern
        from tensortap.rooms.track.options import kind_named

        kinds = {kind_named("kind", each) for each in request.kind}
        matches = TypedPattern(request.pattern).search
        prefix = self._observer.prefix
        return sum(
            (not kinds or kind in kinds) and matches(prefix + name) for kind, name in self._names()
        )

    def _needs_graphs(self) -> bool:
        hooks = self._hooks
        return getattr(hooks, "is_compiled", False) and not hooks.in_graphs

    def _open_for_steps(self, request: ProbeRequest, step: int) -> str:
        """Trace a local variable, or record operations, for some steps."""
        try:
            verb = offer(f"probe.{request.action}")
        except MissingRoom as error:
            raise TensortapError(str(error)) from None
        stack = contextlib.ExitStack()
        if request.action == "ops":
            stack.enter_context(verb(self._model))
        else:
            tracer = stack.enter_context(verb(self._model, [request.pattern], results=False))
            if tracer.missing:
                stack.close()
                raise TensortapError(f"nothing is traced: {tracer.missing[request.pattern]}")
        steps = request.steps or 1
        self._open.append((step + steps, request.pattern, stack))
        what = "operations" if request.action == "ops" else request.pattern
        return f"{what} for {steps} steps"

    def end_step(self) -> None:
        """Close what was opened for steps that have passed."""
        for entry in list(self._open):
            if entry[0] <= self._observer.step_number:
                self._open.remove(entry)
                entry[2].close()

    def close(self) -> None:
        """Close everything that is open, and let go of the model."""
        for *_, stack in self._open:
            stack.close()
        self._open.clear()
        self._hooks = self._model = None
