"""`tensortap resume-check`: does a program that goes on from its checkpoint compute the same?

The program runs three times, in copies of its folder: until it has written a checkpoint, then again
from there, and once without an interruption. Digests of its state before each step are compared.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import typer

from tensortap.cli.terminal import message
from tensortap.core.errors import TensortapError
from tensortap.core.files import plain
from tensortap.core.limits import format_size

_MOST_BYTES = 2 << 30  # of the folder that is copied, twice
States = list[dict[str, str]]


def resume_check(
    program: list[str] = typer.Argument(
        ..., metavar="-- python PROGRAM [ARGUMENTS]…", help="The command that trains."
    ),
    steps: int = typer.Option(1, help="Interrupt it after the first checkpoint from this step on."),
    more: int = typer.Option(5, help="Steps to compare after the checkpoint."),
    resume: str = typer.Option("", help="The command that resumes; by default the same one."),
) -> None:
    """Interrupt a training after its checkpoint, resume it, and name what differs.

    The program runs in copies of the current folder, below which its checkpoints have to be. Exit
    with 1 if a weight, optimizer state, scheduler, random state, batch or buffer differs from those
    of a run without an interruption.
    """
    if steps < 1 or more < 1:
        raise TensortapError(f"--steps and --more must be at least 1, got {steps} and {more}")
    with tempfile.TemporaryDirectory(prefix="tensortap-resume-") as place:
        folders = [_copy_folder(Path(place, name)) for name in ("resumed", "whole")]
        before = _run(program, folders[0], ["--checkpoint", str(steps)])
        done = len(before)
        message(f"interrupted after step {done}, at which it has written a checkpoint")
        after = _run(shlex.split(resume) or program, folders[0], ["--last", str(more)])
        whole = _run(program, folders[1], ["--last", str(done + more)])
    found = compared(before, after, whole)
    for line in found:
        print(plain(line, 2000))
    if not found:
        count = min(len(after), len(whole) - done)
        message(f"{count} steps after the checkpoint are the same, bit by bit")
    raise typer.Exit(int(bool(found)))


def _copy_folder(to: Path) -> Path:
    size = sum(each.lstat().st_size for each in Path.cwd().rglob("*"))
    if size > _MOST_BYTES:
        raise TensortapError(
            f"{Path.cwd()} has {format_size(size)}, and is copied twice: run the command in a "
            "folder with the program alone, and give it absolute paths of its data"
        )
    return Path(shutil.copytree(Path.cwd(), to, symlinks=True))


def _run(command: Sequence[str], folder: Path, options: Sequence[str]) -> States:
    """Run a command in a folder; return the states before its steps."""
    python, *words = command
    shown = shlex.join(command)
    if "python" not in Path(python).name:
        raise TensortapError(f"the command must be python PROGRAM …, got {shown}")
    file = folder.with_suffix(".jsonl")
    child = [python, "-m", "tensortap.rooms.resume.command", str(file), *options, "--", *words]
    code = subprocess.run(child, cwd=folder, stdout=sys.stderr, check=False).returncode
    if code or not file.exists():
        ended = f"ended with exit code {code}" if code else "made no step with a torch optimizer"
        raise TensortapError(f"{shown} has {ended}")
    states = [json.loads(line) for line in file.read_text().splitlines()]
    file.unlink()
    if "--checkpoint" in options and states[-1:] != [{}]:
        raise TensortapError(
            f"it has ended after {len(states)} steps, and no step came after a checkpoint "
            "(torch.save): let it save earlier, or train longer"
        )
    return [state for state in states if state]


def compared(before: States, after: States, whole: States) -> list[str]:
    """Return what a resumed program does otherwise than one that was not interrupted, as lines.

    >>> compared([{"weight a": "1"}], [{"weight a": "5"}], [{"weight a": "1"}, {"weight a": "2"}])
    ['● step 2, the first after the checkpoint: weight a']
    """
    done = len(before)
    for number, (one, two) in enumerate(zip(before, whole, strict=False), 1):
        if one != two:
            raise TensortapError(
                f"two runs from the start differ at step {number} ({_first_of(one, two)[0]}), so "
                "nothing can be said about the resumed one: seed the program"
            )
    if not after or len(whole) <= done:
        raise TensortapError(f"no step came after step {done}: train longer, or lower --more")
    weights = {name: found for name, found in after[0].items() if name.startswith("weight ")}
    if done and weights.items() <= whole[0].items():
        text = "● it begins with the weights of its first step: no checkpoint was loaded. "
        return [text + "If another command resumes, name it with --resume"]
    for number, (one, two) in enumerate(zip(after, whole[done:], strict=False)):
        if one != two:
            place = "the first" if not number else f"number {number + 1}"
            lines = _first_of(one, two)
            lines[0] = f"● step {done + number + 1}, {place} after the checkpoint: {lines[0]}"
            return lines
    return []


def _first_of(one: dict[str, str], two: dict[str, str]) -> list[str]:
    """Return the first difference of each part of the state, and how many there are."""
    found: dict[str, list[str]] = {}
    for name in dict.fromkeys([*two, *one]):
        if one.get(name) != two.get(name):
            part = " ".join(name.split(" ")[: 1 + name.startswith(("optimizer", "random"))])
            text = name if name in one else f"{name}, which is missing after the resume"
            if name in one and part in ("scheduler", "optimizer setting"):
                text += f": {one[name]} instead of {two.get(name, 'none')}"
            found.setdefault(part, []).append(text)
    return [
        each[0] + (f", and {len(each) - 1} more" if each[1:] else "") for each in found.values()
    ]


def main() -> None:
    """Run a program in this process, and write its states to a file."""
    from tensortap.rooms.program.program import AfterImport, execute

    file, option, number, _, *words = sys.argv[1:]

    def look() -> None:
        from tensortap.rooms.resume.torch import StateRecorder

        StateRecorder(Path(file), int(number), at_checkpoint=option == "--checkpoint").attach()

    sys.meta_path.insert(0, AfterImport("torch", look))
    module = words[0] == "-m"
    sys.exit(execute(words[module:], module))


if __name__ == "__main__":
    main()
