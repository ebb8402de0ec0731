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
    offers={
        "track.analyses": "tensortap.rooms.health.listening:analyses_of",
        "track.listeners": "tensortap.rooms.health.listening:step_rules_of",
        "report.sections": "tensortap.rooms.health.report:report_sections",
    },
    rules="tensortap.rooms.health.rules:RULES",
)
