"""Runs of many parts are opened without the footers of their files."""

from __future__ import annotations

import shutil

import pyarrow.parquet as pq
import pytest

import tensortap as tap
from tensortap.core.files import CorruptFile
from tensortap.runs.tables import PartFile


@pytest.fixture
def run(tmp_path):
    path = tap.init(tmp_path)
    for step in range(4):
        tap.step(step)
        tap.catch(float(step), "x")
    tap.finish()
    return path


def test_footers_are_read_when_rows_are_needed(run, monkeypatch):
    part = run / "records/00000/0000.parquet"
    for number in range(1, 300):
        shutil.copyfile(part, part.with_name(f"{number:04}.parquet"))
    read = []
    read_metadata = pq.read_metadata
    monkeypatch.setattr(pq, "read_metadata", lambda path: read.append(path) or read_metadata(path))
    reader = tap.open(run).reader
    assert reader.counts() == {"x": 1200}
    assert not read
    assert len(reader.table(["step"])) == 1200
    assert len(read) == 300


@pytest.mark.attack("contents of a part that lie")
def test_contents_are_checked_before_rows_are_read(run):
    part = run / "records/00000/0000.parquet"
    good = part.read_bytes()
    for lie, said in (
        (b'"rows": 5', "5 rows|4 rows, not 5"),
        (b'"sows": 4', "metadata is missing"),
    ):
        part.write_bytes(good.replace(b'"rows": 4', lie))
        with pytest.raises(CorruptFile, match=said):
            tap.open(run).stats()
    for end in (b"\x18\x09tensortap\x18\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01PAR1", b"PAR1"):
        part.write_bytes(good + end)
        with pytest.raises(CorruptFile):
            tap.open(run).stats()
    part.write_bytes(good)
    assert PartFile(part, 0).contents == PartFile(part, 0)._contents_in_footer
    part.unlink()
    with pytest.raises(CorruptFile, match="cannot be read"):
        PartFile(part, 0)
