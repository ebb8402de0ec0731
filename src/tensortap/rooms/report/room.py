"""Report: a run as one HTML file, into which rooms put sections."""

from __future__ import annotations

from tensortap.rooms import Room

ROOM = Room(
    name="report",
    needs=("figures",),
    commands={"report": "tensortap.rooms.report.command:report"},
    offers={"run.report": "tensortap.rooms.report.run_report:report"},
)
