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
from tensortap import Kind, TensortapError
from tensortap.rooms.figures.colors import NAN_COLOR, color_table
from tensortap.rooms.watch.films.recorder import film_name
from tensortap.rooms.watch.films.video import FilmError
from tests.watch.films.filming import frames_of, near, record

ROOT = Path(__file__).parents[3]
SMALL = {"size": (320, 240)}


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def diagonal(k, side=16):
    return np.eye(side, k=k, dtype=np.float32)


@pytest.mark.slow
def test_films_a_moving_diagonal(tmp_path):
    """Frame k has ones k cells right of the diagonal."""
    recorder = tap.Recorder(tmp_path, range=(0, 1), colormap="aurora", size=(480, 360), fps=25)
    shifts = range(-6, 7)
    for step, k in enumerate(shifts):
        recorder(record(diagonal(k), "weights", step))
    (film,) = recorder._open.values()
    box = film._painter._pictures["image"].box
    recorder.close()
    assert names(tmp_path) == ["weights-rank0.mp4"]
    pictures, times = frames_of(tmp_path / "weights-rank0.mp4")
    assert times == pytest.approx([i / 25 for i in range(13)], abs=1e-3)
    assert {picture.shape for picture in pictures} == {(360, 480, 3)}
    bright, dark = color_table("aurora")[[-1, 0]]
    side = box.height // 16
    assert box.height == box.width == 16 * side
    for k, picture in zip(shifts, pictures, strict=True):
        cells = picture[box.top : box.bottom, box.left : box.right]
        middles = cells[side // 2 :: side, side // 2 :: side]
        assert (near(middles, bright, 50) == (diagonal(k) > 0)).all()
        assert (near(middles, dark, 50) == (diagonal(k) == 0)).all()


@pytest.mark.slow
def test_nan_keeps_its_color_in_a_film(tmp_path):
    x = np.random.default_rng(0).standard_normal((2048, 2048), np.float32)
    x[500, 1000] = np.nan
    with tap.Recorder(tmp_path) as recorder:
        recorder(record(x))
    (picture,), _ = frames_of(tmp_path / "x-rank0.mp4")
    assert near(picture[60:430], NAN_COLOR, 90).sum() >= 4


def test_sides_are_rounded_up_to_even_numbers(tmp_path):
    with tap.Recorder(tmp_path, size=(321, 239)) as recorder:
        recorder(record(diagonal(0)))
    assert frames_of(tmp_path / "x-rank0.mp4")[0][0].shape == (240, 322, 3)


def test_films_two_names_and_steps_with_gaps(tmp_path):
    with tap.Recorder(tmp_path, **SMALL) as recorder:
        for step in (0, 1, 500, 9000):
            recorder(record(diagonal(0), "a", step))
            if step < 100:
                recorder(record(float(step), "loss", step, Kind.METRIC))
    assert names(tmp_path) == ["a-rank0.mp4", "loss-metric-rank0.mp4"]
    _, times = frames_of(tmp_path / "a-rank0.mp4")
    assert times == pytest.approx([0, 0.05, 0.1, 0.15], abs=1e-3)  # one frame per record
    assert len(frames_of(tmp_path / "loss-metric-rank0.mp4")[0]) == 2


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
@pytest.mark.parametrize(
    "name",
    [
        "../../x",
        "/etc/passwd",
        "a/b\\c:d",
        "😀 emoji",
        "n" * 300,
        "",
        "..",
        "\n\x00",
        "CON",
        "a" * 179,
    ],
)
@pytest.mark.attack("path outside a folder")
def test_hostile_names_stay_in_the_folder(tmp_path, name):
    folder = tmp_path / "deep" / "videos"
    with tap.Recorder(folder, format="gif", **SMALL) as recorder:
        recorder(record(diagonal(0), name))
        recorder(record(diagonal(0), name + "?"))
    assert len(names(folder)) == 2
    assert names(tmp_path) == ["deep"]
    assert names(tmp_path / "deep") == ["videos"]


def test_names_have_distinct_files():
    assert len({film_name(name, Kind.VALUE, 0, "") for name in ("a/b", "a_b", "a%2Fb", "a b")}) == 4


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


def test_ignores_alerts(tmp_path):
    with tap.Recorder(tmp_path / "videos", **SMALL) as recorder:
        recorder(record("exploding", kind=Kind.ALERT))
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"format": "avi"}, "'mp4' or 'gif'"), ({"fps": 0}, "more than 0"),
        ({"max_frames": 0}, "at least 1"), ({"open_films": 0}, "at least 1"),
        ({"mode": "x"}, "mode must be"), ({"range": (1, 0)}, "the smaller first"),
        ({"size": 640}, "width and height"), ({"size": (640.0, 480.0)}, "width and height"),
        ({"size": ("a", "b")}, "width and height"), ({"range": 5}, "a pair like"),
        ({"range": ("a", 2)}, "a pair like"), ({"fps": "fast"}, "got 'fast'"),
        ({"max_frames": 2.5}, "a whole number"),
    ],
)  # fmt: skip
def test_rejects_wrong_options(wrong, message):
    with pytest.raises((TensortapError, TypeError, ValueError), match=message):
        tap.Recorder(**wrong)


PROGRAM = f"""
    import sys
    sys.path[:0] = [{str(ROOT / "src")!r}, {str(ROOT)!r}]
    import numpy as np, tensortap as tap
    from tests.watch.films.filming import record
    recorder = tap.Recorder("videos", size=(160, 120))
    for step in range(1000000):
        recorder(record(np.eye(8, k=step % 5), "x", step))
        print(step, flush=True)
        if step == 10:
            END
"""


@pytest.mark.slow
def test_films_are_complete_without_closing(tmp_path):
    ends = {"break": 0, "raise ValueError": 1, "raise KeyboardInterrupt": -2}
    programs = []
    for number, end in enumerate(ends):
        (tmp_path / str(number)).mkdir()
        code = textwrap.dedent(PROGRAM).replace("END", end)
        programs.append(subprocess.Popen(
            [sys.executable, "-c", code], cwd=tmp_path / str(number), stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        ))  # fmt: skip
    for number, (program, code) in enumerate(zip(programs, ends.values(), strict=True)):
        _, errors = program.communicate(timeout=100)
        assert program.returncode == code, errors
        assert len(frames_of(tmp_path / str(number) / "videos" / "x-rank0.mp4")[0]) == 11


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
    done = subprocess.run(
        [sys.executable, "-c", "import os\n" + whole], cwd=tmp_path, capture_output=True,
        timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(frames_of(tmp_path / "videos" / "x-rank0.mp4")[0]) == 20
