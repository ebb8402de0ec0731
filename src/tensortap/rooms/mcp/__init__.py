"""MCP: what agents and other programs ask about runs and live sessions."""
