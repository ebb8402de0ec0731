"""Addresses of servers: ``host``, ``host:port``, ``[::1]:port``."""

from __future__ import annotations

import ipaddress
import os
from typing import NamedTuple

DEFAULT_PORT = 2875


class Address(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def endpoint(self) -> str:
        return f"tcp://{self}"

    @property
    def loopback(self) -> bool:
        """Whether the address cannot be reached from another machine."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def default_port() -> int:
    """Return ``TENSORTAP_PORT``, or 2875."""
    return parse_port(os.environ.get("TENSORTAP_PORT") or DEFAULT_PORT)


def parse_address(text: str | None = None) -> Address:
    """Return the address in `text`, else in ``TENSORTAP_SERVER``, else that of this machine.

    >>> str(parse_address("gpu7:4000"))
    'gpu7:4000'
    """
    if text is not None and not isinstance(text, str):
        raise TypeError(f"server must be 'host' or 'host:port', got {text!r:.80}")
    text = (text or os.environ.get("TENSORTAP_SERVER") or "127.0.0.1").strip()
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":")
    elif text.count(":") > 1:  # a bare IPv6 address
        host, port = text, ""
    else:
        host, _, port = text.partition(":")
    if not host:
        raise ValueError(f"address must be 'host' or 'host:port', got {text!r}")
    if host == "localhost":
        host = "127.0.0.1"
    return Address(host, parse_port(port) if port else default_port())


def parse_port(text: str | int) -> int:
    """Return the number of a port; raise ValueError if it is not one."""
    try:
        port = int(text)
    except (TypeError, ValueError):
        port = -1
    if not 0 <= port < 65536:
        raise ValueError(f"port must be a number from 0 to 65535, got {text!r}")
    return port
