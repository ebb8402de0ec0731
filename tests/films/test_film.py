"""Films of stored runs, by function and on the command line."""

from __future__ import annotations

import os
import sys

import numpy as np
import pytest

import tensortap as tap
from tensortap import TensortapError
from tensortap.core.errors import NotFound
from tests.films.filming import frames_of


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Write a run with tensors, numbers and a dump."""
    folder = tmp_path_factory.mktemp("films")
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith("TENSORTAP_") or name in ("RANK", "WORLD_SIZE"):
                patch.delenv(name)
        patch.setenv("XDG_CONFIG_HOME", str(folder))
        patch.setenv("TENSORTAP_SERVER", "127.0.0.1:1")
        patch.setenv("TENSORTAP_MODIFICATIONS", "0")  # a search of all modules takes seconds
        path = tap.init(folder / "runs")
        for step in range(6):
            tap.step(step * 10)
            tap.catch(np.eye(8, k=step, dtype=np.float32), "weights")
            tap.catch(1.0 / (step + 1), "loss")
            tap.catch(np.full((8, 6), step, np.float32), "both")
        tap.dump(np.ones((3, 4)), "dumped")
        tap.finish()
    return path


@pytest.mark.slow
def test_films_numbers_and_dumps_in_every_format(run, tmp_path):
    opened = tap.open(run)
    seen = []
    options = {"size": (320, 240), "progress": lambda *done: seen.append(done)}
    assert opened.film("loss", tmp_path / "loss.gif", **options) == 6
    assert opened.film("dumped", tmp_path / "dumped.gif", **options) == 1
    assert (
        opened.film("weights", tmp_path / "w.mp4", steps=(10, 30), mode="surface", **options) == 3
    )
    assert opened.film("weights", tmp_path / "w2.gif", steps=(None, 15), **options) == 2
    assert seen[-1] == (2, 2)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["dumped.gif", "loss.gif", "w.mp4", "w2.gif"]


def test_errors_leave_no_file(run, tmp_path):
    opened = tap.open(run)
    with pytest.raises(NotFound, match="did you mean 'weights'"):
        opened.film("weight", tmp_path / "w.mp4")
    with pytest.raises(NotFound, match="captured steps are 0 to 50"):
        opened.film("weights", tmp_path / "w.mp4", steps=(60, None))
    with pytest.raises(NotFound, match="no 'weights' on rank 3"):
        opened.film("weights", tmp_path / "w.mp4", rank=3)
    with pytest.raises(TensortapError, match=r"w\.avi: a film is \.mp4 or \.gif"):
        opened.film("weights", tmp_path / "w.avi")
    assert not list(tmp_path.iterdir())
    (tmp_path / "w.mp4").write_text("mine")
    with pytest.raises(TensortapError, match=r"w\.mp4 already exists"):
        opened.film("weights", tmp_path / "w.mp4")
    assert (tmp_path / "w.mp4").read_text() == "mine"


@pytest.fixture
def command(monkeypatch, capsys):
    """Return a function that runs ``tensortap film`` here and returns its code and messages."""
    from tensortap.cli.main import main

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["tensortap", "film", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        output, messages = capsys.readouterr()
        assert output == ""
        return ended.value.code, messages

    return run


def test_command_makes_a_film(run, tmp_path, command):
    target = tmp_path / "out.mp4"
    code, messages = command(
        run, "weights", target, "--mode", "surface", "--size", "400x300", "--fps", "10",
        "--range=-1,1", "--steps", "10:40", "--rank", "0", "--kind", "value",
    )  # fmt: skip
    assert (code, messages) == (0, f"tensortap: wrote 4 frames to {target}\n")
    pictures, times = frames_of(target)
    assert pictures[0].shape == (300, 400, 3)
    assert times == pytest.approx([0, 0.1, 0.2, 0.3])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "no 'nothing'"),
        (["weights", "--size", "big"], "--size must look like 640x480, got 'big'"),
        (["weights", "--range", "1,b"], "--range must be a rule or look like -1,1"),
        (["weights", "--fps", "nan"], "got nan"),
    ],
)
def test_command_reports_misuse_in_one_line(run, tmp_path, arguments, message, command):
    name, *options = arguments
    code, messages = command(run, name, tmp_path / "out.mp4", *options)
    assert code == 2
    assert messages.startswith("tensortap: ")
    assert message in messages
    assert messages.count("\n") == 1
    assert not list(tmp_path.iterdir())
