"""Health: rules over training steps."""

from __future__ import annotations

from tensortap.rooms import Room, Tab

ROOM = Room(
    name="health",
    needs=("figures", "report", "track"),
    commands={"check": "tensortap.rooms.health.check:check"},
    tabs=(Tab("health.js", 45),),
    routes="tensortap.rooms.health.routes:ROUTES",
    offers={
        "track.listeners": "tensortap.rooms.health.steps:monitor_of",
        "report.sections": "tensortap.rooms.health.report:report_sections",
    },
    rules="tensortap.rooms.health.rules:RULES",
)
