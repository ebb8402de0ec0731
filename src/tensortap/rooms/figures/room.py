"""Figures: plotly figures, and widgets of notebooks."""

from __future__ import annotations

from tensortap.rooms import Room, Tab

ROOM = Room(
    name="figures",
    needs=("formats", "logframe"),
    tabs=(
        Tab("overview.js", 10),
        Tab("lines.js", 20),
        Tab("exponents.js", 30),
        Tab("tensors.js", 40),
    ),
    routes="tensortap.rooms.figures.routes:ROUTES",
    offers={
        "page.curves": "tensortap.rooms.figures.figures.training:training_curves",
    },
)
