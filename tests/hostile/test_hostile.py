"""Every command ends on every hostile run: with one sentence, soon, and in little memory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hostile import corpus

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hostile")


def write_all(folder: Path, hostile: dict[str, corpus.Hostile], *, sealed: bool):
    base = folder / ("sealed" if sealed else "open")
    base.mkdir()
    good = corpus.good_run(base, sealed=sealed)
    runs = {}
    for number, (name, change) in enumerate(hostile.items()):
        run = base / f"{number:03d}" / "run"
        shutil.copytree(good, run)
        change(run)
        runs[name] = str(run)
    return runs, str(good)


@pytest.mark.parametrize("sealed", [False, True], ids=["open", "sealed"])
def test_every_command_ends_with_one_sentence(folder, sealed):
    hostile = corpus.SEALED if sealed else corpus.OPEN
    assert len(corpus.OPEN) + len(corpus.SEALED) >= 71
    runs, good = write_all(folder, hostile, sealed=sealed)
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile.commands"],
        input=json.dumps({"runs": runs, "good": good}),
        capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    wrong = json.loads(done.stdout.splitlines()[-1])
    assert not wrong, "\n".join(f"{run} · {command}: {why}" for run, command, why in wrong)
