"""Health: rules over training steps, analyses, and `tensortap run`."""

from __future__ import annotations

from tensortap.rooms import Room, Tab

ROOM = Room(
    name="health",
    needs=("figures", "track"),
    commands={
        "check": "tensortap.rooms.health.check_command:check",
        "run": "tensortap.rooms.health.run_command:run",
    },
    tabs=(Tab("health.js", 80),),
    routes="tensortap.rooms.health.routes:ROUTES",
    rules="tensortap.rooms.health.rules:RULES",
    offers={"report.sections": "tensortap.rooms.health.report:report_sections"},
)
