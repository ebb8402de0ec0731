"""Every command ends on every hostile run: with one sentence, soon, and in little memory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import typer

from tensortap.cli.main import app
from tests.commands import type_in
from tests.hostile import commands, corpus
from tests.proof import kind_of

pytestmark = pytest.mark.slow


COMMANDS = 19
# commands that read no run; tests/page shows hostile ones, and bisect runs a program of the user
# those that read no run, or run a program
OTHERS = {
    "bisect", "demo", "doctor", "mcp", "probe", "probes", "resume-check", "run", "serve", "top",
    "view",
}  # fmt: skip


def write_all(folder: Path, hostile: dict[str, corpus.Hostile], **kind: bool):
    good = corpus.good_run(folder, **kind)
    runs = {}
    for number, (name, change) in enumerate(hostile.items()):
        run = folder / f"{number:03d}" / "run"
        shutil.copytree(good, run)
        change(run)
        runs[name] = str(run)
    return runs, str(good)


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    """A process that runs commands: its imports take longer than many of them."""
    errors = tmp_path_factory.mktemp("commands") / "errors"
    with errors.open("w") as file, subprocess.Popen(
        [sys.executable, "-m", "tests.hostile.commands"], cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True,
    ) as started:  # fmt: skip
        started.errors = errors
        yield started
        started.kill()


@pytest.fixture
def check(process, tmp_path, request, record_property):
    """Run all commands on each run in `make attack`, else one of them in turn."""
    share = COMMANDS if kind_of(request.config) is None else 1

    record_property(
        "tried", COMMANDS * len(corpus.OPEN | corpus.SEALED | corpus.COMPACTED) // share
    )

    def check(hostile: dict[str, corpus.Hostile], **kind: bool) -> None:
        runs, good = write_all(tmp_path / "-".join(map(str, kind.values())), hostile, **kind)
        print(json.dumps({"runs": runs, "good": good, "share": share}), file=process.stdin)
        process.stdin.flush()
        line = process.stdout.readline()
        wrong = json.loads(line) if line else [["all", "all", process.errors.read_text()[-3000:]]]
        assert not wrong, "\n".join(f"{run} · {command}: {why}" for run, command, why in wrong)

    return check


@pytest.mark.attack("hostile runs")
@pytest.mark.timeout(1200)
def test_every_command_ends_with_one_sentence(check, tmp_path):
    """In one test, because a process takes long until it has imported all that commands need."""
    typed = commands.commands(tmp_path, tmp_path, tmp_path)
    known = set(typer.main.get_command(app).commands)
    assert {words[0] for words in typed.values()} == known - OTHERS
    assert len(typed) == COMMANDS
    assert len(corpus.OPEN) + len(corpus.SEALED) >= 71
    check(corpus.OPEN, sealed=False)
    check(corpus.SEALED, sealed=True)
    check(corpus.COMPACTED, sealed=True, compacted=True)


SECRET = 20261.75  # in a file that no run may show
WORD = "nobody-may-read-this"


def secret_files(folder: Path) -> dict[str, Path]:
    """Write files of the victim, by the names of the files of a run that link to them."""
    folder.mkdir()
    array = np.full((64, 64), SECRET, "f4")
    names = "project.patch", "packages.json", "runtime_info.json", "f.npy", "payload", "records"
    paths = {name: folder / name for name in names}
    paths["project.patch"].write_text(f"diff --git a/{WORD} b/{WORD}\n")
    paths["packages.json"].write_text(json.dumps({"all_packages": {"torch": WORD}}))
    paths["runtime_info.json"].write_text(json.dumps({"command": {"full_command": WORD}}))
    np.save(paths["f.npy"], array[0, :4])
    theirs = corpus.good_run(folder / "other", sealed=False)
    corpus.change(theirs, "x", name=WORD)
    payload = corpus.payload_of(theirs)
    paths["payload"].write_bytes(payload.read_bytes()[: -array.nbytes * 3] + array.tobytes() * 3)
    shutil.move(theirs / "records", paths["records"])
    return paths


@pytest.mark.attack("path outside a folder")
def test_shows_nothing_that_a_link_leads_to(tmp_path, record_property):
    secrets = secret_files(tmp_path / "victim")
    good = corpus.good_run(tmp_path / "good", sealed=False)
    record_property("tried", len(secrets))
    for name, secret in secrets.items():
        run, out = tmp_path / name / "run", tmp_path / name / "out"
        shutil.copytree(good, run)
        out.mkdir()
        place = {"payload": corpus.payload_of(run)}.get(name, run / name)
        shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)
        place.symlink_to(secret)
        arguments = commands.commands(run, good, out)
        chosen = "show", "show a tensor", "show a file", "compare --json", "report"
        lines = [type_in(*arguments[each]) for each in chosen]
        printed = "".join(out + err for _, out, err in lines)
        printed += "".join(path.read_text() for path in out.glob("*.html"))
        assert WORD not in printed, name
        assert str(SECRET)[:5] not in printed, name
