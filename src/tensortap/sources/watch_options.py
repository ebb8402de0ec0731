"""Options of `watch`: checked before anything starts."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from tensortap.record import Kind
from tensortap.sources.checks import check_callable, check_choice, check_count, check_positive
from tensortap.sources.patterns import NamePattern, Patterns

_OUTPUTS = (Kind.ACTIVATION, Kind.WEIGHT)
_GRADIENTS = (Kind.GRADIENT, Kind.WEIGHT_GRADIENT)
_OF_TARGETS = ("targets", "name", "what", "transform", "include", "exclude")


class WatchSelection(NamedTuple):
    """What hooks capture of a target."""

    what: str = "outputs"
    include: NamePattern = None
    exclude: NamePattern = None

    def updated(
        self, what: str | None, include: NamePattern, exclude: NamePattern
    ) -> WatchSelection:
        """Return the selection with the options that are not None."""
        options = {"what": what, "include": include, "exclude": exclude}
        given = {option: value for option, value in options.items() if value is not None}
        selection = self._replace(**given)  # type: ignore[arg-type]
        check_choice("what", selection.what, ("outputs", "gradients", "both"))
        return selection

    def patterns(self) -> Patterns:
        """Return which names of which kinds are captured."""
        outputs = _OUTPUTS if self.what != "gradients" else ()
        gradients = _GRADIENTS if self.what != "outputs" else ()
        return Patterns(self.include, self.exclude, frozenset((*outputs, *gradients)))


def check_options(
    function: Any, on_close: Any, transform: Any, rate: Any, processes: Any, timeout: Any, name: Any
) -> None:
    """Raise for an option that makes no sense."""
    for argument, value in (
        ("on_record", function), ("on_close", on_close), ("transform", transform),
    ):  # fmt: skip
        if value is not None:
            check_callable(argument, value)
    if isinstance(function, type):
        made = f"{function.__name__}(...)"
        raise TypeError(f"on_record must be a function or an object, got a class; pass {made}")
    if rate is not None:
        check_positive("rate", rate)
    check_count("processes", processes)
    check_positive("timeout", timeout)
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name must be a string, got {name!r:.80}")


def check_unchanged(name: str, given: dict[str, Any], signature: inspect.Signature) -> None:
    """Raise if options are given that only a new watcher can have."""
    for option, parameter in signature.parameters.items():
        if option not in _OF_TARGETS and given[option] != parameter.default:
            raise TypeError(
                f"{option} cannot be changed to {given[option]!r:.80}, because the watcher "
                f"{name!r} is already running; pass another name to start a new one"
            )


def named_targets(targets: Any) -> list[tuple[str, Any]]:
    """Return each target with the prefix of its names."""
    if isinstance(targets, Mapping):
        for name in targets:
            if not isinstance(name, str) or not name:
                raise TypeError(f"names of targets must be non-empty strings, got {name!r:.80}")
        return list(targets.items())
    if isinstance(targets, (list, tuple)):
        return [(f"{type(target).__name__}{i}", target) for i, target in enumerate(targets)]
    return [("", targets)]


def selected_ranks(ranks: Any) -> frozenset[int] | None:
    """Return the ranks that watch; None stands for all."""
    if ranks == "all":
        return None
    single = isinstance(ranks, (int, str)) or not isinstance(ranks, Iterable)
    selected = frozenset([ranks] if single else ranks)
    if not all(isinstance(rank, int) for rank in selected):
        raise TypeError(f"ranks must be a rank, several ranks, or 'all', got {ranks!r:.80}")
    return selected
