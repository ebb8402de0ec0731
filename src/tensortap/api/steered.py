"""Live sessions, from which the programs that send to them can be changed while they train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensortap.api.lookup import Values
from tensortap.core.arguments import checked
from tensortap.core.rooms import offer


class Steered(Values):
    """A live session, of this process or of another one."""

    def ask(self, what: str, **arguments: Any) -> bytes:
        """Return the encoded answer to a question of a viewer."""
        raise NotImplementedError

    @checked
    def probes(self, pattern: str = "") -> list[Any]:
        """Return what the running programs can look at: modules, parameters, catch sites.

        Each probe says how often it is looked at and what that has cost so far. `pattern` is a
        regular expression of RE2.
        """
        found: list[Any] = offer("session.probes")(self, pattern)
        return found

    @checked
    def probe(
        self,
        pattern: str = "",
        *,
        every: int = 1,
        tensors: bool = False,
        steps: int = 0,
        kind: str | Sequence[str] | None = None,
        off: bool = False,
        reset: bool = False,
        trace: str | None = None,
        ops: bool = False,
        rules: str | Sequence[str] | None = None,
        stop: bool = False,
        recompile: bool = False,
        timeout: float = 10.0,
    ) -> Any:
        """Switch probes while the programs train, on all ranks from the same step on.

        ``session.probe("blocks.*.attn", every=10, tensors=True, steps=5)`` looks at names that
        match a regular expression, each 10th step, keeps whole tensors, and ends after 5 steps.

        - `kind`: kinds of records, such as ``"gradient"``
        - `off`: look at them no more; `reset`: as the program says again
        - `trace`: the path of a local variable, as for `tap.trace`
        - `ops`: record all operations of the next step, or of `steps`
        - `rules`: names of rules that are to look from now on
        - `stop`: end training; the program needs ``TENSORTAP_CONTROL=stop``
        - `recompile`: allow to compile a model anew that was compiled without probes
        - `timeout`: seconds to wait until all ranks are at that step
        """
        return offer("session.probe")(
            self, pattern, every=every, tensors=tensors, steps=steps, kind=kind, off=off,
            reset=reset, trace=trace, ops=ops, rules=rules, stop=stop, recompile=recompile,
            timeout=timeout,
        )  # fmt: skip
