"""Color maps that print in gray and that color-blind people can read."""

from __future__ import annotations

import numpy as np
import pytest

from tensortap import TensortapError
from tensortap.rooms.films.style import (
    DIVERGING,
    NAN_COLOR,
    NEGINF_COLOR,
    POSINF_COLOR,
    SEQUENTIAL,
    color_table,
    parse_color,
)

# simulations of color blindness (Machado, Oliveira and Fernandes 2009)
BLIND = {
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
               [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
               [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
               [0.004733, 0.691367, 0.303900]],
}  # fmt: skip


def lightness(rgb):
    """Return how light colors look, from 0 to 1: the cube root of their luminance."""
    linear = np.where(rgb <= 10, rgb / 255 / 12.92, ((rgb / 255 + 0.055) / 1.055) ** 2.4)
    return np.cbrt(linear @ [0.2126, 0.7152, 0.0722])


def test_sequential_map_rises_in_lightness():
    light = lightness(color_table(SEQUENTIAL))
    assert (np.diff(light) > -0.004).all()  # up to the rounding to 8 bits
    assert (light[10:] > light[:-10]).all()
    assert light[-1] - light[0] > 0.6


def test_diverging_map_is_lightest_in_the_middle_and_symmetric():
    light = lightness(color_table(DIVERGING))
    middle = len(light) // 2
    assert light.argmax() in range(middle - 3, middle + 4)
    assert np.abs(light - light[::-1]).max() < 0.03


@pytest.mark.parametrize("kind", BLIND)
def test_ends_of_the_diverging_map_differ_for_everybody(kind):
    seen = color_table(DIVERGING) @ np.array(BLIND[kind]).T
    assert np.abs(seen[20] - seen[-21]).max() > 60


@pytest.mark.parametrize("colormap", [SEQUENTIAL, DIVERGING])
def test_nan_and_inf_differ_from_both_maps(colormap):
    table = color_table(colormap).astype(int)
    strange = np.array([NAN_COLOR, POSINF_COLOR, NEGINF_COLOR])
    for color in strange:
        assert np.abs(table - color).sum(axis=1).min() > 90
    for a in range(3):
        for b in range(a):
            assert np.abs(strange[a] - strange[b]).sum() > 200


def test_rejects_unknown_colors():
    with pytest.raises(TensortapError, match="unknown color 'nocolor'"):
        parse_color("nocolor")
    with pytest.raises(TensortapError, match="three numbers from 0 to 255"):
        parse_color((1, 2, 300))
