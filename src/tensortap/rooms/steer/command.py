"""`tensortap probes` and `tensortap probe`: look into a running job, and change what is seen."""

from __future__ import annotations

import typer

from tensortap.cli.terminal import json_option, print_json

_SESSION = typer.Option(None, "--session", metavar="HOST:PORT", help="The live session.")
_PROGRAM = "program, host, pid, rank, world_size, step, probes, left_out, trouble"
_PROBE = "name, kind, every, tensors, seen, spent_ns"


def probes(
    pattern: str = typer.Argument("", help="Names, as a regular expression."),
    session: str | None = _SESSION,
    as_json: bool = json_option(f"a list of {_PROGRAM}; a probe is a list of {_PROBE}"),
) -> None:
    """Show what the programs of a live session can look at, and what it has cost so far."""
    import msgspec

    from tensortap.api.open import RemoteSession
    from tensortap.rooms.steer.steer import probes as probes_of

    with RemoteSession(session) as opened:
        found = probes_of(opened, pattern)
    if as_json:
        print_json(msgspec.to_builtins(list(found)))
    else:
        print(found)
    raise typer.Exit(0 if found else 1)


def probe(
    pattern: str = typer.Argument("", help="Names, as a regular expression; none is all."),
    every: int = typer.Option(1, min=0, help="Look at each n-th step."),
    tensors: bool = typer.Option(False, help="Keep whole tensors."),
    steps: int = typer.Option(0, min=0, help="End after n steps; 0 is never."),
    kind: list[str] = typer.Option([], help="A kind of records; may be repeated."),
    off: bool = typer.Option(False, "--off", help="Look at these no more."),
    reset: bool = typer.Option(False, "--reset", help="Look as the program says."),
    trace: str | None = typer.Option(None, help="Path of a local variable."),
    ops: bool = typer.Option(False, "--ops", help="Record all operations of the next step."),
    rules: str | None = typer.Option(None, help="Rules to use from now on: nan,exploding"),
    stop: bool = typer.Option(False, "--stop", help="End training after a step."),
    recompile: bool = typer.Option(False, "--recompile", help="Allow to compile models anew."),
    session: str | None = _SESSION,
    as_json: bool = json_option("at, ranks, complete"),
) -> None:
    """Switch what running programs look at, on all ranks from the same step on.

    Exit with 1 if a rank has gone, was too late, or refuses.
    """
    import msgspec

    from tensortap.api.open import RemoteSession

    with RemoteSession(session) as opened:
        change = opened.probe(
            pattern, every=every, tensors=tensors, steps=steps, kind=kind or None, off=off,
            reset=reset, trace=trace, ops=ops, rules=rules, stop=stop, recompile=recompile,
        )  # fmt: skip
    print_json(msgspec.to_builtins(change)) if as_json else print(change)
    raise typer.Exit(0 if change.complete else 1)
