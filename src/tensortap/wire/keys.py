"""The key that both ends of a live session share, and what is derived from it.

The first `serve()` of a user writes a key file that only this user can read. Over loopback
the key authenticates both sides with a challenge each; the key itself never travels. Beyond
loopback it also gives the CURVE key pairs of both sides.
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

from tensortap.errors import TensortapError

_PREFIX = "tap1-"
NONCE = 16


class KeyFileError(TensortapError):
    """The key cannot be used, and what to do."""


def key_path() -> Path:
    """Where this user's key lies: ``~/.config/tensortap/key``."""
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    try:
        return Path(base).expanduser() / "tensortap" / "key"
    except RuntimeError:  # a container whose user is nobody that it knows
        raise KeyFileError(
            "this user has no home for a key: set TENSORTAP_KEY, or XDG_CONFIG_HOME to a folder"
        ) from None


def key_text(key: bytes) -> str:
    """The key as it is written into ``TENSORTAP_KEY``."""
    return _PREFIX + base64.urlsafe_b64encode(key).decode().rstrip("=")


def parse_key(text: str) -> bytes:
    """The key behind its text."""
    body = text.strip()
    try:
        if not body.startswith(_PREFIX):
            raise ValueError
        key = base64.urlsafe_b64decode(body.removeprefix(_PREFIX) + "=")
        if len(key) != 32:
            raise ValueError
    except (ValueError, binascii.Error):
        raise KeyFileError(
            "not a tensortap key: set TENSORTAP_KEY to what serve() printed, or remove it"
        ) from None
    return key


def find_key() -> bytes | None:
    """The key of the environment, else of the key file, else None."""
    text = os.environ.get("TENSORTAP_KEY")
    if text:
        return parse_key(text)
    path = key_path()
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())  # of what is read, not of what lay there before
            if status.st_uid != os.getuid():
                raise KeyFileError(
                    f"{path} belongs to another user: remove it or set TENSORTAP_KEY"
                )
            if status.st_mode & 0o077:
                raise KeyFileError(f"others can read {path}: run chmod 600 {path}")
            text = file.read(1000).decode("ascii", "replace")
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    except OSError as error:
        raise KeyFileError(f"cannot read {path}: {error.strerror}") from None
    try:
        return parse_key(text)
    except KeyFileError:
        raise KeyFileError(
            f"no tensortap key is in {path}: remove it or set TENSORTAP_KEY"
        ) from None


def make_key() -> bytes:
    """The user's key; a new one, in a file only this user can read, if there was none."""
    key = find_key()
    if key is not None:
        return key
    path = key_path()
    try:
        _write_key(path)
    except OSError as error:
        raise KeyFileError(
            f"cannot write {path} ({error.strerror}): set TENSORTAP_KEY, or XDG_CONFIG_HOME to a "
            "folder that can be written"
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
        # link, not rename: whoever came first keeps his key
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()


def proof(key: bytes, role: str, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """What only a holder of the key can say about these two nonces."""
    text = b"tensortap 1 " + role.encode() + b"\0" + client_nonce + server_nonce
    return hmac.new(key, text, hashlib.sha256).digest()


def proven(key: bytes, role: str, client_nonce: bytes, server_nonce: bytes, mac: bytes) -> bool:
    """Whether `mac` comes from a holder of the key."""
    return hmac.compare_digest(proof(key, role, client_nonce, server_nonce), mac)


def curve_pair(key: bytes, role: str) -> tuple[bytes, bytes]:
    """The (public, secret) CURVE keys of the ``server`` or of the ``client``."""
    import zmq
    from zmq.utils import z85

    seed = hmac.new(key, b"tensortap curve " + role.encode(), hashlib.sha256).digest()
    secret = z85.encode(seed)
    return zmq.curve_public(secret), secret
