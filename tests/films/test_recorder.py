"""The recorder: one film per name, complete however the program ends."""

from __future__ import annotations

import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import tensortap as tap
from tensortap import TensortapError
from tensortap.core.record import Kind
from tensortap.rooms.films.video import FilmError
from tests.films.filming import frames_of, record

ROOT = Path(__file__).parents[2]
SMALL = {"size": (320, 240)}


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def diagonal(k, side=16):
    return np.eye(side, k=k, dtype=np.float32)


@pytest.mark.slow
def test_file_names_contain_kind_rank_and_device(tmp_path):
    with tap.Recorder(tmp_path, format="gif", **SMALL) as recorder:
        for rank, device in ((0, "cuda:0"), (1, "cuda:1"), (1, "")):
            for kind in (Kind.VALUE, Kind.WEIGHT_GRADIENT):
                tags = {"device": device} if device else {}
                recorder(record(diagonal(0), "fc", 0, kind, rank, 2, **tags))
    assert names(tmp_path) == [
        "fc-rank0-cuda0.gif", "fc-rank1-cuda1.gif", "fc-rank1.gif",
        "fc-weight_gradient-rank0-cuda0.gif", "fc-weight_gradient-rank1-cuda1.gif",
        "fc-weight_gradient-rank1.gif",
    ]  # fmt: skip


def test_starts_a_new_file_after_max_frames(tmp_path):
    for _ in range(2):
        with tap.Recorder(tmp_path, max_frames=3, **SMALL) as recorder:
            for step in range(7):
                recorder(record(diagonal(step), "x", step))
        assert len(recorder.films) == 3
    parts = ["x-rank0.mp4", *(f"x-rank0-{i}.mp4" for i in range(2, 7))]
    assert names(tmp_path) == sorted(parts)
    assert [len(frames_of(tmp_path / part)[0]) for part in parts] == [3, 3, 1, 3, 3, 1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "a/b\\c:d", "n" * 300, "", "\n\x00"])
@pytest.mark.attack("path outside a folder")
def test_hostile_names_stay_in_the_folder(tmp_path, name):
    folder = tmp_path / "deep" / "videos"
    with tap.Recorder(folder, format="gif", **SMALL) as recorder:
        recorder(record(diagonal(0), name))
        recorder(record(diagonal(0), name + "?"))
    assert len(names(folder)) == 2
    assert names(tmp_path) == ["deep"]
    assert names(tmp_path / "deep") == ["videos"]


def test_pickle_contains_settings_only(tmp_path):
    recorder = tap.Recorder(tmp_path, mode="surface", fps=12, max_frames=5, **SMALL)
    recorder(record(diagonal(0)))
    copy = pickle.loads(pickle.dumps(recorder))
    assert (copy.fps, copy.max_frames, copy.style) == (12, 5, recorder.style)
    assert copy.films == []
    recorder.close()
    copy(record(diagonal(1)))
    copy.close()
    assert names(tmp_path) == ["x-rank0-2.mp4", "x-rank0.mp4"]


def test_creating_a_recorder_is_cheap(tmp_path):
    code = f"""
import sys; sys.path.insert(0, {str(ROOT / "src")!r})
import tensortap as tap
tap.Recorder({str(tmp_path / "videos")!r})
print([name for name in ("av", "PIL", "sklearn", "torch", "pandas") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert names(tmp_path) == []


def test_counts_frames_beyond_open_films(tmp_path, caplog):
    recorder = tap.Recorder(tmp_path, open_films=3, format="gif", **SMALL)
    for step in range(5):
        for name in "abcde":
            recorder(record(diagonal(0), name, step))
    assert recorder.dropped == {"d": 5, "e": 5}
    assert caplog.text.count("not filmed") == 1  # once, not for every name
    assert "'d' is not filmed" in caplog.text
    recorder.close()
    assert names(tmp_path) == ["a-rank0.gif", "b-rank0.gif", "c-rank0.gif"]


def test_reports_a_folder_that_cannot_be_created(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FilmError, match=r"cannot create the folder .*file/videos: Not a directory"):
        tap.Recorder(tmp_path / "file" / "videos", **SMALL)(record(diagonal(0)))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"format": "avi"}, "'mp4' or 'gif'"), ({"fps": 0}, "more than 0"),
        ({"max_frames": 0}, "at least 1"), ({"open_films": 0}, "at least 1"),
        ({"mode": "x"}, "mode must be one of auto, image"),
        ({"size": 640}, "width and height"), ({"size": (640.0, 480.0)}, "width and height"),
        ({"size": (10, 10)}, "from 160x120 to 8192x8192"), ({"range": 5}, "a pair like"),
        ({"range": ("a", 2)}, "a pair like"), ({"range": (1, 0)}, "the smaller first"),
        ({"range": "some"}, "follow"), ({"range": (0, np.inf)}, "the smaller first"),
        ({"legend_color": "nothing"}, "unknown color"),
    ],
)  # fmt: skip
def test_rejects_wrong_options(wrong, message):
    with pytest.raises((TensortapError, TypeError, ValueError), match=message):
        tap.Recorder(**wrong)


PROGRAM = f"""
    import sys
    sys.path[:0] = [{str(ROOT / "src")!r}, {str(ROOT)!r}]
    import numpy as np, tensortap as tap
    from tests.films.filming import record
    recorder = tap.Recorder("videos", size=(160, 120))
    for step in range(1000000):
        recorder(record(np.eye(8, k=step % 5), "x", step))
        print(step, flush=True)
        if step == 10:
            END
"""


def run(program, folder):
    return subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, timeout=100, check=False
    )


@pytest.mark.slow
def test_film_is_complete_without_closing(tmp_path):
    done = run(textwrap.dedent(PROGRAM).replace("END", "raise KeyboardInterrupt"), tmp_path)
    assert done.returncode == -2, done.stderr
    assert len(frames_of(tmp_path / "videos" / "x-rank0.mp4")[0]) == 11


@pytest.mark.slow
def test_forked_child_does_not_complete_the_film(tmp_path):
    program = """
        recorder(record(np.eye(8), "x", step + 1))
        child = os.fork()
        if not child:
            sys.exit(0)
        os.waitpid(child, 0)
        for step in range(12, 20):
            recorder(record(np.eye(8), "x", step))
        break
    """
    program = textwrap.indent(textwrap.dedent(program), " " * 8)
    whole = textwrap.dedent(PROGRAM).replace("        END", program)
    done = run("import os\n" + whole, tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(frames_of(tmp_path / "videos" / "x-rank0.mp4")[0]) == 20
