"""What docs/coming-from/pytorch-inspector.md says runs: line by line, and in a notebook."""

import re
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from torch import nn

import tensortap as tap

PAGE = Path(__file__).parents[2] / "docs" / "coming-from" / "pytorch-inspector.md"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.classifier = nn.Sequential(nn.Linear(4, 8))

    def forward(self, x):
        return self.classifier(x)


@pytest.mark.slow
@pytest.mark.usefixtures("no_errors")
def test_page_works_line_by_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    lines = [row[1].strip("`") for row in rows if re.match(r"`(\w+ = )?tap\.|`watcher\.", row[1])]
    assert len(lines) == 5
    model = Net()
    names = {"tap": tap, "model": model}
    for line in lines[:3]:
        exec(line, names)
    model(torch.randn(6, 4)).sum().backward()
    for line in lines[3:]:
        exec(line, names)
    films = sorted(path.name for path in (tmp_path / "output").iterdir())
    assert films == [
        "c0-gradient-rank0-cpu.mp4", "model-activation-rank0-cpu.mp4",
        "model.classifier-activation-rank0-cpu.mp4", "model.classifier.0-activation-rank0-cpu.mp4",
    ]  # fmt: skip
    with pytest.raises(tap.core.errors.NotFound):
        tap.watcher()


NOTEBOOK = """
import torch
import tensortap as tap
seen = []

def note(record):
    seen.append(float(tap.rooms.watch.array_of(record).sum()))

def write():
    with open("seen.txt", "w") as file:
        file.write(" ".join(map(str, seen)))

model = torch.nn.Linear(2, 1)
torch.nn.init.ones_(model.weight)
torch.nn.init.zeros_(model.bias)
with tap.watch({"model": model}, on_record=note, on_close=write, every=2) as watcher:
    for step in range(6):
        model(torch.full((1, 2), float(step)))
assert not seen  # they are the worker's
assert watcher.receipt.processed == 3, watcher.receipt
"""


@pytest.mark.slow
def test_callback_of_a_notebook_runs_in_a_fork(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(PAGE.parents[2] / "src"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    cells = [nbformat.v4.new_code_cell(NOTEBOOK)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    where = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=60, kernel_name="python3", resources=where).execute()
    assert (tmp_path / "seen.txt").read_text() == "0.0 4.0 8.0"
