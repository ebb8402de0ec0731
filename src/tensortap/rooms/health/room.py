"""Health: rules over training steps, analyses, and `tensortap run`."""

from __future__ import annotations

from tensortap.rooms import Room, Tab

ROOM = Room(
    name="health",
    needs=("figures", "track"),
    commands={"check": "tensortap.cli.check:check", "run": "tensortap.cli.run:run"},
    tabs=(Tab("health.js", 80),),
    routes="tensortap.web.routes.health:ROUTES",
    rules="tensortap.rooms.health.rules:RULES",
)
