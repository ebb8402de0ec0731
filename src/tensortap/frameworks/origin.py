"""Tell where a value that is not finite was made, from the calls that were under way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import FrameType
from typing import NamedTuple


class EnclosingCall(NamedTuple):
    """A call that contains another one: its module, the code that made the inner call, its input.

    `worst` returns ``"NaN"``, ``"Inf"``, ``"-Inf"`` or an empty text for what the input contained.
    """

    name: str
    caller: str
    worst: Callable[[], str]


def origin_tags(
    name: str, found: str, after: str, last: str, enclosing: Iterable[EnclosingCall]
) -> dict[str, str]:
    """Return tags that say where the output of module `name` became non-finite.

    `found` is what its input contained, `after` where inside the module the values may come from,
    and `last` the module that returned last before.

    >>> origin_tags("o", "NaN", "", "q", [EnclosingCall("attn", "Attn.forward", lambda: "")])[
    ...     "where"
    ... ]
    'its input was NaN already, made in Attn.forward, between q and o'
    """
    if found in ("", "-Inf"):
        where = "its input had -Inf, as masks do" if found else "its input was finite"
        return {"origin": name, "where": f"{where}: made in {after}" if after else where}
    target = name
    for call in enclosing:
        if not call.worst():
            between = f"between {last} and {target}" if last else f"before {target}"
            where = f"its input was {found} already, made in {call.caller}, {between}"
            return {"origin": call.name, "where": where}
        target = call.name
    return {"origin": target, "where": f"the input of {target} was {found}: check the batch"}


def behind(names: Iterable[str]) -> dict[str, str]:
    """Return the tag of a gradient with the modules whose backward pass made it, the inner ones.

    >>> behind(["attn", "attn.q"])
    {'behind': 'attn.q'}
    """
    names = list(dict.fromkeys(names))
    inner = [n for n in names if not any(other.startswith(f"{n}.") for other in names)]
    return {"behind": " ".join(inner)}


def caller_name(frame: FrameType) -> str:
    """Return the function and the line that a frame runs.

    >>> import sys
    >>> caller_name(sys._getframe()).startswith("<module> (<doctest")
    True
    """
    code = frame.f_code
    return f"{code.co_qualname} ({code.co_filename.rpartition('/')[2]}:{frame.f_lineno})"
