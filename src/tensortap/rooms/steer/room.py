"""Steer: switch the probes of a running job."""

from __future__ import annotations

from tensortap.rooms import Room, Tab

ROOM = Room(
    name="steer",
    commands={
        "probes": "tensortap.rooms.steer.command:probes",
        "probe": "tensortap.rooms.steer.command:probe",
    },
    tabs=(Tab("probes.js", 45),),
    routes="tensortap.rooms.steer.routes:ROUTES",
    offers={
        "session.answer.probes": "tensortap.rooms.steer.asking:answer_probes",
        "session.answer.probe": "tensortap.rooms.steer.asking:answer_probe",
        "session.probes": "tensortap.rooms.steer.steer:probes",
        "session.probe": "tensortap.rooms.steer.steer:probe",
    },
)
