"""examples/film_training.py, with fewer frames."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.films.filming import frames_of

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_example_makes_two_films(tmp_path, monkeypatch, capsys):
    path = ROOT / "examples" / "film_training.py"
    spec = importlib.util.spec_from_file_location("film_training", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.setattr(example, "FRAMES", 3)
    threads = torch.get_num_threads()
    try:
        example.main(str(tmp_path))
    finally:
        torch.set_num_threads(threads)
    films = capsys.readouterr().out.splitlines()
    assert [len(frames_of(film)[0]) for film in films] == [3, 3]
