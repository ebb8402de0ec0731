"""Every command ends on every hostile run: with one sentence, soon, and in little memory."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tensortap.runs import tables
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


def million_names(folder: Path) -> Path:
    """Write a run with as many names as records."""
    run = corpus.good_run(folder, sealed=True)
    table = pq.read_table(corpus.part_of(run)).slice(0, 1)
    names = [f"model.layers.{i}.weight" for i in range(1_000_000)]
    table = table.take(pa.array(np.zeros(len(names), np.int64)))
    for column, cells in (("name", pa.array(names)), ("seq", pa.array(range(len(names))))):
        place = table.schema.get_field_index(column)
        table = table.set_column(place, table.schema.field(column), cells)
    kind = table.column("kind")[0].as_py()
    counts = {name: {kind: 1} for name in names}
    contents = tables.Contents(len(names), 0, 0, len(names) - 1, 0, 0, counts)
    table = table.replace_schema_metadata(tables.metadata(0, contents))
    pq.write_table(table, corpus.part_of(run), row_group_size=8192)
    return run


def test_a_million_names(tmp_path):
    run = million_names(tmp_path)
    for arguments in (["ls", str(tmp_path)], ["show", str(run)]):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-m", "tensortap", *arguments],
            capture_output=True, text=True, cwd=Path(__file__).parents[2], check=True,
        )  # fmt: skip
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert "1,000,000" in done.stdout
        assert after.ru_utime - before.ru_utime < 5  # not the time of a clock: others work, too
