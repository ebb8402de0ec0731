"""Operations: every operation of a step, and why one made a NaN."""

from __future__ import annotations

from tensortap.rooms import Room, Tab

ROOM = Room(
    name="ops",
    needs=("figures", "provenance", "report", "track"),
    commands={"why": "tensortap.rooms.ops.command:why"},
    tabs=(Tab("operations.js", 25),),
    routes="tensortap.rooms.ops.routes:ROUTES",
    offers={
        "alerts.explanation": "tensortap.rooms.ops.explanation:decode_explanation",
        "page.verdicts": "tensortap.rooms.ops.verdicts:explain_rows",
        "probe.ops": "tensortap.rooms.ops.ops:ops",
        "track.origins": "tensortap.rooms.ops.torch_origins:Origins",
        "report.sections": "tensortap.rooms.ops.why:report_sections",
    },
)
