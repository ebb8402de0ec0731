"""The interface between hooks and the observer that they report to.

Hooks of a framework get an observer handed in. They know no pipeline, no sink and no options: the
observer says what to capture, takes it, and takes the errors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tensortap.core.record import Kind, Shard, Summary

if TYPE_CHECKING:
    from tensortap.rooms.track.batches import ObservedBatch


class Observed(NamedTuple):
    """A tensor that a hook has seen: everything but its values."""

    name: str
    kind: Kind
    call: int = 0
    type: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    shard: Shard | None = None
    tags: dict[str, str] = {}  # noqa: RUF012  never changed


Explain = Callable[[Summary], dict[str, str]]
"""Returns tags that say where a tensor became non-finite; ``track.origins`` finds them."""


class HookObserver(Protocol):
    """Whoever hooks observe for."""

    only_training: bool  # whether to ignore models in eval() mode
    explains: bool  # whether to look for the origin of values that are not finite
    inputs: bool  # whether to capture the tensors that modules are called with, too
    unseen: dict[str, str]  # names that cannot be observed as usual, and why; hooks add to it

    @property
    def batch(self) -> ObservedBatch | None:
        """Return what takes tensors of which nothing but statistics is captured, if anything."""

    @property
    def kinds(self) -> Collection[Kind]:
        """Return the kinds of records to capture."""

    @property
    def active(self) -> bool:
        """Return whether observing has begun and not ended."""

    @property
    def capturing(self) -> bool:
        """Return whether to capture now: this step is selected and capturing is enabled."""

    @property
    def step_number(self) -> int:
        """Return the current training step."""

    def wants(self, kind: Kind, name: str) -> bool:
        """Return whether a name of a kind is selected in this step."""

    def could_want(self, kind: Kind, name: str) -> bool:
        """Return whether a name of a kind may be selected in a later step."""

    def observe(
        self,
        observed: Observed,
        value: Any,
        step: int | None = None,
        stats: Summary | None = None,
        explain: Explain | None = None,
    ) -> Summary | None:
        """Take a tensor, with its statistics if they are known; return them if they are."""

    def fault(self, name: str, error: Exception) -> object:
        """Take an error of a hook; hooks must not raise in the user's program."""


class Hooks(Protocol):
    """Hooks on a model, a parameter or a tensor of the user."""

    def attach(self) -> None:
        """Install the hooks."""

    def detach(self) -> None:
        """Remove every hook."""


class TrackHooks(Hooks, Protocol):
    """Hooks that observe a model step by step."""

    def end_step(self, *states: Any, **named: Any) -> None:
        """Observe what exists at the end of a step: weights, gradients, optimizer state."""


class TrackListener(Protocol):
    """Looks at the steps of a tracked torch model; other rooms offer them to `track`.

    ``track.listeners`` are functions of an `Observer` that return a listener or None;
    ``track.option.NAME`` is one of the value of the option NAME and an `Observer`.
    """

    def hooks(self, tracked: Any) -> TrackHooks:
        """Return hooks on a `TrackedModule`: attached after those of `track`, detached before."""


def inputs_of(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], tensor: type
) -> Iterator[tuple[str, Any]]:
    """Yield the tensors that a module is called with; the path continues the module's name.

    >>> list(inputs_of((1.5,), {"mask": (2.5, 3.5)}, float))
    [('.input[0]', 1.5), ('.input[mask][0]', 2.5), ('.input[mask][1]', 3.5)]
    """
    return tensors_in({**dict(enumerate(args)), **kwargs}, tensor, ".input")


def tensors_in(
    value: Any, tensor: type | tuple[type, ...], path: str = "", depth: int = 0
) -> Iterator[tuple[str, Any]]:
    """Yield the tensors in the output of a module, each with its path; ignore everything else.

    >>> list(tensors_in({"a": (1.5, [2.5])}, float))
    [('[a][0]', 1.5), ('[a][1][0]', 2.5)]
    """
    if isinstance(value, tensor):
        yield path, value
    elif value is None or isinstance(value, (str, bytes, int, float)) or depth > 20:
        return
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, tensor, f"{path}[{key}]", depth + 1)
    elif isinstance(value, (list, tuple)):
        names = getattr(value, "_fields", range(len(value)))
        for key, item in zip(names, value, strict=False):
            yield from tensors_in(item, tensor, f"{path}[{key}]", depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            item = getattr(value, field.name, None)
            yield from tensors_in(item, tensor, f"{path}[{field.name}]", depth + 1)
