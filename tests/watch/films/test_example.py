"""examples/film_training.py, with fewer frames."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.watch.films.filming import frames_of

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_example_makes_two_films(tmp_path, monkeypatch, capsys):
    path = ROOT / "examples" / "film_training.py"
    spec = importlib.util.spec_from_file_location("film_training", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.setattr(example, "FRAMES", 6)
    threads = torch.get_num_threads()
    try:
        example.main(str(tmp_path))
    finally:
        torch.set_num_threads(threads)
    films = capsys.readouterr().out.splitlines()
    assert [len(frames_of(film)[0]) for film in films] == [6, 6]


@pytest.mark.slow
def test_film_of_the_readme_is_small_and_moves():
    path = ROOT / "docs" / "images" / "film.gif"
    assert path.stat().st_size < 1.5e6
    pictures, _ = frames_of(path)
    assert len(pictures) >= 60
    assert (pictures[0] != pictures[-1]).any()
