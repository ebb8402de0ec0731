"""Frames of any tensor, with every value in its place."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tensortap.core.record import Kind, Number, Summary, TensorData
from tensortap.rooms.figures.reals import reals, shrink
from tensortap.rooms.films.frames import Painter, mode_for
from tensortap.rooms.films.pictures import FrameContent
from tensortap.rooms.films.style import (
    MODES,
    NAN_COLOR,
    NEGINF_COLOR,
    POSINF_COLOR,
    SEQUENTIAL,
    THEME,
    Style,
    color_table,
)
from tests.films.filming import draw, near, record

RNG = np.random.default_rng(0)
X = RNG.standard_normal((24, 32))
DTYPES = [
    "bool", "int8", "uint8", "int16", "int32", "int64", "uint64", "float16", "float32", "float64",
    "complex64", "complex128", ">f4", ">i2",
]  # fmt: skip
ML_DTYPES = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn", "int4"]


# the other modes convert numbers as these do
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["image", "histogram"])
def test_draws_every_dtype(mode):
    for dtype in (*DTYPES, *ML_DTYPES):
        with np.errstate(all="ignore"):
            x = (np.abs(X) * 3).astype(getattr(ml_dtypes, dtype, dtype))
        frame = draw(x, mode=mode, size=(320, 240))
        assert frame.shape == (240, 320, 3)
        colors = frame[50:200:2, 50:250:2].reshape(-1, 3) @ [1, 256, 65536]
        assert len(np.unique(colors)) > 3, dtype


ODD_TENSORS = [
    np.zeros((0, 4)), np.zeros((0,)), np.array(3.0), np.zeros((1, 1, 1)), np.full((4, 4), np.nan),
    np.full((6, 5), -np.inf), np.full((3, 7), 2.5), np.zeros((5, 5)), np.zeros((1, 9)),
    np.zeros((9, 1)), np.zeros((2, 2)), np.arange(3.0), np.zeros((2, 1, 3, 1, 2)),
    np.array([[1e308, -1e308], [np.inf, 5e-324]]), np.array(["a", "b"]),
    np.array(["2026-01-01"], "M8[D]"),
]  # fmt: skip


@pytest.mark.parametrize(
    "mode", [pytest.param(m, marks=pytest.mark.slow) if m == "tsne" else m for m in MODES]
)
def test_draws_odd_tensors(mode):
    for x in ODD_TENSORS:
        painter = Painter(Style(mode=mode, size=(320, 240)))
        first = painter.draw(record(x)).copy()
        if mode != "tsne":  # which takes half a second per frame
            painter.draw(record(X[:3]))  # another shape in between
        assert painter.draw(record(x, step=1)).shape == first.shape, (x.dtype, x.shape)
        assert (first[..., 3] == 255).all()


def test_draws_every_name_and_value():
    painter = Painter(Style(size=(320, 240)))
    for name in ("", "\n\x00\t", "😀" * 40, "n" * 3000, "\ud800", "العربية"):
        painter.draw(record(X, name=name, message=name, device=name[:50]))
    for value in (1, 2.5, True, 10**30, None, "text", Number("complex", (1.0, 2.0))):
        assert painter.draw(record(value)).shape == (240, 320, 4)


def test_chooses_the_mode_by_shape():
    def mode(x, wanted="auto"):
        return mode_for(wanted, FrameContent(record(x)))

    assert mode(np.zeros((3, 4))) == ("image", "")
    assert mode(np.zeros((1, 3, 4))) == mode(np.zeros((1, 1, 3, 4))) == ("image", "")
    assert mode(np.zeros(5)) == mode(np.zeros((2, 3, 4))) == ("histogram", "")
    assert mode(np.array(1.0)) == mode(2) == ("message", "")
    assert mode(np.zeros(5), "surface") == ("histogram", "no surface of this shape")
    assert mode(np.zeros((1, 3, 4)), "surface") == ("surface", "")
    assert mode(np.zeros((0, 4)), "image") == ("message", "")


def test_draws_every_cell_in_its_place():
    """The cells of a diagonal of ones have the color of 1, all others that of 0."""
    frame = draw(np.eye(8), range=(0, 1), size=(400, 300))
    top, bottom = color_table(SEQUENTIAL)[[-1, 0]]
    rows, columns = np.nonzero(near(frame, top, 0))
    zero = near(frame, bottom, 0)
    square = columns < np.nonzero(zero)[1].max() + 60  # without the color bar
    height, width = np.ptp(rows[square]) + 1, np.ptp(np.nonzero(zero[:, :300])[1]) + 1
    assert height == width  # square cells
    side = height // 8
    y0, x0 = rows.min(), np.nonzero(zero)[1].min()
    for i in range(8):
        for j in range(8):
            cell = frame[y0 + i * side : y0 + (i + 1) * side, x0 + j * side : x0 + (j + 1) * side]
            assert (cell == (top if i == j else bottom)).all(), (i, j)


def test_shows_one_nan_among_four_million():
    x = RNG.standard_normal((2048, 2048), np.float32)
    clean = draw(x)
    assert not near(clean, NAN_COLOR).any()
    x[512, 1536] = np.nan
    x[1024, 1024] = np.inf
    x[1536, 512] = -np.inf
    frame = draw(x)
    picture = frame[60:430]
    box = near(clean, THEME.line, 0)  # its thin frame
    rows, columns = np.nonzero(box)
    for color, (down, across) in (
        (NAN_COLOR, (0.25, 0.75)), (POSINF_COLOR, (0.5, 0.5)), (NEGINF_COLOR, (0.75, 0.25)),
    ):  # fmt: skip
        y, x_at = np.nonzero(near(picture, color, 0))
        assert len(y) >= 25  # five pixels each way
        middle = 60 + y.mean(), x_at.mean()
        assert middle[0] == pytest.approx(rows.min() + down * np.ptp(rows), abs=3)
        assert middle[1] == pytest.approx(columns.min() + across * np.ptp(columns), abs=3)
        assert near(frame[430:], color, 90).sum() > 20  # its count, in thin letters


def test_shrinking_keeps_extremes():
    x = np.zeros((1000, 900), np.float32)
    x[500, 600], x[3, 3] = 7, -8
    small = shrink(x, 10, 9, 0.0)
    assert small.shape == (10, 9)
    assert small[5, 6] == 7
    assert small[0, 0] == -8
    assert np.count_nonzero(small) == 2
    assert shrink(x[:3, :3], 10, 10, 0.0).shape == (3, 3)


@pytest.mark.parametrize(
    ("mode", "shape", "note"),
    [
        ("image", (2000, 50), "up to 6x1 values per pixel"),
        ("surface", (256, 700), "up to 1x3 values per point"),
    ],
)
def test_notes_pixels_that_stand_for_many_values(mode, shape, note):
    painter = Painter(Style(mode=mode))
    painter.draw(record(np.zeros(shape, np.float32)))
    assert painter._pictures[mode].note == note


def test_converts_numbers_exactly():
    big = np.array([2**60, -(2**60), 7])
    assert reals(big).tolist() == [2.0**60, -(2.0**60), 7.0]
    huge = reals(np.array([3 + 4j, 1e200 + 1e200j])).tolist()
    assert huge == [5.0, pytest.approx(2**0.5 * 1e200)]
    halves = np.zeros(2, [("real", np.float16), ("imag", np.float16)])
    halves["real"], halves["imag"] = 3, 4
    assert reals(halves).tolist() == [5.0, 5.0]


def test_centers_colors_at_zero_once_both_signs_occur():
    painter = Painter(Style(size=(320, 240)))
    painter.draw(record(np.abs(X)))
    scale = painter._pictures["image"].scale
    assert not scale.symmetric
    painter.draw(record(X))
    assert scale.limits == (-np.abs(X).max(), np.abs(X).max())
    painter.draw(record(np.abs(X)))
    assert scale.symmetric  # and stays: colors must not change their meaning


def test_frames_do_not_depend_on_earlier_ones():
    painter = Painter(Style(range=(-3, 3), size=(320, 240)))
    alone = painter.draw(record(X, step=5)).copy()
    painter.draw(record(X * 2, step=1234567, message="a long message"))
    painter.draw(record(np.full((24, 32), np.nan), step=6))
    assert (painter.draw(record(X, step=5)) == alone).all()


def test_legend_shows_the_facts():
    base = draw(X, range=(-3, 3))

    def changed(frame):
        return np.nonzero((frame != base).any(axis=-1))

    def frame(**tags):
        return Painter(Style(range=(-3, 3))).draw(record(X, **tags))[..., :3].copy()

    rows, _ = changed(frame(name="another"))
    assert rows.max() < 40
    rows, columns = changed(frame(step=77))
    assert rows.max() < 40
    assert columns.min() > 500
    for tags in ({"message": "epoch 3"}, {"device": "cuda:0"}, {"kind": Kind.WEIGHT}, {"rank": 3}):
        rows, _ = changed(frame(**tags))
        assert len(rows)
        assert rows.max() < 62
    stats = FrameContent(record(X)).summary
    wrong = Summary(*[getattr(stats, f) if f != "mean" else 123.0 for f in stats.__struct_fields__])
    rows, _ = changed(frame(stats=wrong))
    assert rows.min() > 440


def test_color_of_the_legend():
    assert not near(draw(X), (255, 140, 0), 10).any()
    assert near(draw(X, legend_color="#ff8c00"), (255, 140, 0), 10).sum() > 50


def test_draws_packed_dtypes_as_bits():
    value = TensorData("torch", "float4_e2m1fn_x2", (4, 8), bytes(range(32)))
    assert Painter(Style(size=(320, 240))).draw(record(value)).shape == (240, 320, 4)
