"""MCP: a server of the Model Context Protocol over runs and live sessions."""

from __future__ import annotations

from tensortap.rooms import Room

ROOM = Room(
    name="mcp",
    needs=("compare", "figures", "films", "health", "ops"),
    commands={"mcp": "tensortap.rooms.mcp.command:mcp"},
)
