"""The key that clients and servers of a user share, and what is derived from it.

The first `serve()` of a user writes a key file that only this user can read. The CURVE key pairs
of client and server are derived from it, so that each side proves to have it; it is never sent.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import hmac
import os
import secrets
from pathlib import Path

from tensortap.core.errors import TensortapError

_PREFIX = "tap1-"


class KeyFileError(TensortapError):
    """The key cannot be used; the message says what to do."""


def key_path() -> Path:
    """Return the path of this user's key: ``~/.config/tensortap/key``."""
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    try:
        return Path(base).expanduser() / "tensortap" / "key"
    except RuntimeError:  # for example an unknown user id in a container
        raise KeyFileError(
            "this user has no home folder: set TENSORTAP_KEY, or XDG_CONFIG_HOME to a folder"
        ) from None


def key_text(key: bytes) -> str:
    """Return the key as text for ``TENSORTAP_KEY``."""
    return _PREFIX + base64.urlsafe_b64encode(key).decode().rstrip("=")


def parse_key(text: str) -> bytes:
    """Return the key of a text; raise KeyFileError if it is not one."""
    body = text.strip()
    try:
        if not body.startswith(_PREFIX):
            raise ValueError
        key = base64.urlsafe_b64decode(body.removeprefix(_PREFIX) + "=")
        if len(key) != 32:
            raise ValueError
    except (ValueError, binascii.Error):
        raise KeyFileError(
            "not a tensortap key: set TENSORTAP_KEY to what serve() printed, or unset it"
        ) from None
    return key


def find_key() -> bytes | None:
    """Return the key from ``TENSORTAP_KEY`` or from the key file; None if there is none."""
    text = os.environ.get("TENSORTAP_KEY")
    if text:
        return parse_key(text)
    path = key_path()
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())  # not path.stat(): the file may be replaced
            if status.st_uid != os.getuid():
                raise KeyFileError(
                    f"{path} belongs to another user: remove it or set TENSORTAP_KEY"
                )
            if status.st_mode & 0o077:
                raise KeyFileError(f"other users can read {path}: run chmod 600 {path}")
            text = file.read(1000).decode("ascii", "replace")
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    except OSError as error:
        raise KeyFileError(f"cannot read {path}: {error.strerror}") from None
    try:
        return parse_key(text)
    except KeyFileError:
        raise KeyFileError(f"{path} has no tensortap key: remove it or set TENSORTAP_KEY") from None


def make_key() -> bytes:
    """Return the user's key; create the key file if there is no key yet."""
    key = find_key()
    if key is not None:
        return key
    path = key_path()
    try:
        _write_key(path)
    except OSError as error:
        raise KeyFileError(
            f"cannot write {path} ({error.strerror}): set TENSORTAP_KEY, or XDG_CONFIG_HOME to a "
            "writable folder"
        ) from None
    key = find_key()
    if key is None:
        raise KeyFileError(f"cannot read {path}: set TENSORTAP_KEY, or make it readable")
    return key


def _write_key(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f"key.{os.getpid()}.{secrets.token_hex(4)}")
    file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(file, "w") as stream:
            stream.write(key_text(secrets.token_bytes(32)) + "\n")
        # link, not rename: it never replaces the key of a process that was faster
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()


def curve_pair(key: bytes, role: str) -> tuple[bytes, bytes]:
    """Return the (public, secret) CURVE keys of the ``server`` or the ``client``."""
    import zmq
    from zmq.utils import z85

    seed = hmac.new(key, b"tensortap curve " + role.encode(), hashlib.sha256).digest()
    secret = z85.encode(seed)
    return zmq.curve_public(secret), secret
