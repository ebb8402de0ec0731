"""Video files, read back with PyAV."""

from __future__ import annotations

import contextlib
import os
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import av
import numpy as np
import pytest

from tensortap.rooms.films.video import FilmError, VideoWriter

ROOT = Path(__file__).parents[2]
SIZE = (160, 120)


def frame(i, size=SIZE):
    """Return a frame with a bright column whose position is the number of the frame."""
    made = np.full((size[1], size[0], 4), 255, np.uint8)
    made[..., :3] = (10, 20, 60)
    made[:, 10 * i % size[0] : 10 * i % size[0] + 10, :3] = (250, 200, 40)
    return made


def written(path, form, frames=7, fps=20.0, size=SIZE):
    writer = VideoWriter(path, form, size, fps)
    for i in range(frames):
        writer.write(frame(i, size))
    writer.close()
    assert writer.frames == frames
    return path


def column(picture):
    return np.nonzero(picture[60, :, 0] > 150)[0].mean()


@pytest.mark.parametrize(("fps", "frames"), [(20, 7), (30000 / 1001, 31)])
def test_mp4_is_h264_with_every_frame_at_its_time(tmp_path, fps, frames):
    path = written(tmp_path / "a.mp4", "mp4", frames, fps)
    with av.open(str(path)) as film:
        stream = film.streams.video[0]
        assert (stream.codec_context.name, stream.pix_fmt) == ("h264", "yuv420p")
        assert (stream.width, stream.height) == SIZE
        assert float(stream.average_rate) == pytest.approx(fps, rel=1e-3)
        assert film.duration / 1e6 == pytest.approx(frames / fps, rel=0.02)
        found = list(film.decode(video=0))
    assert [f.time for f in found] == pytest.approx([i / fps for i in range(frames)], abs=1e-3)
    for i, each in enumerate(found):
        assert column(each.to_ndarray(format="rgb24")) == pytest.approx(10 * i % 160 + 4.5, abs=1.5)


def boxes(data):
    """Return offset, length and kind of the boxes of an MP4."""
    found, at = [], 0
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        found.append((at, length, kind))
        at += length
    return found


def test_damaged_film_plays_up_to_the_damage(tmp_path):
    """All frames before the damage are decoded."""
    writer = VideoWriter(tmp_path / "a.mp4", "mp4", SIZE, 20)
    for i in range(9):
        writer.write(frame(i))
    data = writer.path.read_bytes()
    writer.close()
    fragments = [box for box in boxes(data) if box[2] in (b"moof", b"mdat")]
    assert len(fragments) == 16  # one per frame, except the last
    for number, (at, length, _) in enumerate(fragments):
        for cut in (at, at + length // 2):
            path = tmp_path / "cut.mp4"
            path.write_bytes(data[:cut])
            found = []
            with av.open(str(path)) as film, contextlib.suppress(av.error.FFmpegError):
                found.extend(film.decode(video=0))  # keeps what came before an error
            assert len(found) >= number // 2, (number, cut)


def test_gif_has_the_colors_of_its_frames(tmp_path):
    path = written(tmp_path / "a.gif", "gif")
    with av.open(str(path)) as film:
        assert film.streams.video[0].codec_context.name == "gif"
        found = list(film.decode(video=0))
    assert [f.time for f in found] == pytest.approx([i / 20 for i in range(7)], abs=0.011)
    for i, each in enumerate(found):
        picture = each.to_ndarray(format="rgb24")
        assert picture.shape == (120, 160, 3)
        assert (picture == frame(i)[..., :3]).all()
    from PIL import Image

    with Image.open(path) as image:
        assert image.n_frames == 7
        assert image.info["loop"] == 0


def test_never_overwrites(tmp_path):
    path = tmp_path / "a"
    path.write_text("mine")
    with pytest.raises(FileExistsError):
        VideoWriter(path, "mp4", SIZE, 20)
    assert path.read_text() == "mine"
    with pytest.raises(FilmError, match=r"cannot .*a/b.*: Not a directory"):
        VideoWriter(path / "b", "mp4", SIZE, 20)


@pytest.mark.slow
def test_full_disk_leaves_a_film_that_plays(tmp_path):
    """For write(), a limit on the file size is like a full disk."""
    program = f"""
        import resource, sys
        sys.path[:0] = [{str(ROOT / "src")!r}, {str(ROOT)!r}]
        import numpy as np
        from pathlib import Path
        from tensortap.rooms.films.video import FilmError, VideoWriter
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
        writer = VideoWriter(Path("a.mp4"), "mp4", (160, 120), 20)
        rng = np.random.default_rng(0)
        try:
            for i in range(1000):
                writer.write(rng.integers(0, 255, (120, 160, 4), np.uint8))
        except FilmError as error:
            print(error)
            print(writer.frames)
        try:
            writer.write(np.zeros((120, 160, 4), np.uint8))
        except FilmError as error:
            print(error)
        writer.close()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], cwd=tmp_path, capture_output=True,
        text=True, timeout=100, check=False, env=dict(os.environ),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    message, frames, again = done.stdout.splitlines()
    assert message == f"the film a.mp4 ends after {frames} frames: File too large"
    assert again == "the film a.mp4 has been closed"
    with av.open(str(tmp_path / "a.mp4")) as film:
        assert len(list(film.decode(video=0))) >= int(frames) - 2 > 2


def test_closes_twice_and_without_frames(tmp_path):
    for form in ("mp4", "gif"):
        writer = VideoWriter(tmp_path / form, form, SIZE, 20)
        writer.close()
        writer.close()


def test_names_the_extra_when_pyav_is_missing(tmp_path, monkeypatch):
    from tensortap.core.errors import MissingExtra

    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(MissingExtra, match="films need PyAV: pip install av Pillow"):
        VideoWriter(tmp_path / "a.mp4", "mp4", SIZE, 20)
    assert not (tmp_path / "a.mp4").exists()
