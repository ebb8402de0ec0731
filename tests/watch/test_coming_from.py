"""What docs/coming-from/pytorch-inspector.md says runs, line by line."""

import re
from pathlib import Path

import pytest
import torch
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
        assert tap.watcher().flush(250)  # on a busy machine, the end would not wait so long
        exec(line, names)
    films = sorted(path.name for path in (tmp_path / "output").iterdir())
    assert films == [
        "c0-gradient-rank0-cpu.mp4", "model-activation-rank0-cpu.mp4",
        "model.classifier-activation-rank0-cpu.mp4", "model.classifier.0-activation-rank0-cpu.mp4",
    ]  # fmt: skip
    with pytest.raises(tap.core.errors.NotFound):
        tap.watcher()
