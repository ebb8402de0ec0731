"""The tensors in what a module returns, each with its place in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

_DEPTH = 20


def leaves(value: Any, tensor: type, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """All tensors in tuples, dicts, dataclasses and what else holds them; the rest is passed over.

    >>> list(leaves({"a": (1.5, [2.5])}, float))
    [('[a][0]', 1.5), ('[a][1][0]', 2.5)]
    """
    if isinstance(value, tensor):
        yield path, value
    elif value is None or isinstance(value, (str, bytes, int, float)) or depth > _DEPTH:
        return
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, tensor, f"{path}[{key}]", depth + 1)
    elif isinstance(value, (list, tuple)):
        names = getattr(value, "_fields", range(len(value)))
        for key, item in zip(names, value, strict=False):
            yield from leaves(item, tensor, f"{path}[{key}]", depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            item = getattr(value, field.name, None)
            yield from leaves(item, tensor, f"{path}[{field.name}]", depth + 1)
