"""A question of the page, and its answer as JSON, remembered as long as it is true."""

from __future__ import annotations

import base64
import collections
import logging
import secrets
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from tensortap.errors import NotFound, TensortapError
from tensortap.record import Kind
from tensortap.web.entries import Shown

log = logging.getLogger("tensortap")

_REMEMBERED = 64 << 20  # bytes of answers
_LONGEST = 4 << 20  # of one that is remembered
_DELETED = "this is no longer to be had: the run was deleted while it was shown"
_BOOT = secrets.token_hex(6)  # versions count from one again when the server starts anew


class Asked:
    """What a request asks for: its words as what they mean, mistakes said in a sentence."""

    def __init__(self, place: Any, request: Request) -> None:
        self.place = place  # the `Place` that is asked
        self._words = request.query_params

    @property
    def shown(self) -> Shown:
        """The run or live session that is meant."""
        found: Shown = self.place.library.get(self.text("run"))
        return found

    @property
    def other(self) -> Shown | None:
        """Another one, to compare with."""
        return self.place.library.get(self.text("other")) if self.text("other") else None

    def deleted(self) -> bool:
        """Whether a run that is meant is not there any more."""
        try:
            return any(each is not None and each.gone for each in (self.shown, self.other))
        except TensortapError:
            return False  # it never was

    def text(self, name: str, default: str = "") -> str:
        return str(self._words.get(name, default))

    def texts(self, name: str) -> list[str]:
        return list(self._words.getlist(name))

    def number(self, name: str) -> int | None:
        said = self.text(name)
        if not said:
            return None
        try:
            return int(said)
        except ValueError:
            raise TensortapError(f"{name} is a number, not {said!r}") from None

    def numbers(self, name: str) -> list[int]:
        """Numbers with commas between them."""
        try:
            return [int(word) for word in self.text(name).split(",") if word]
        except ValueError:
            said = self.text(name)
            raise TensortapError(f"{name} are numbers like 0,1,2, not {said!r}") from None

    def flag(self, name: str) -> bool:
        return self.text(name) in ("1", "true", "yes")

    @property
    def kind(self) -> Kind | None:
        said = self.text("kind")
        try:
            return Kind(said) if said else None
        except ValueError:
            kinds = ", ".join(kind.value for kind in Kind)
            raise NotFound(f"no kind is called {said!r}; there is {kinds}") from None


Answer = Callable[[Asked], Any]


class Memory:
    """Answers by question and version, the least recently given forgotten first."""

    def __init__(self) -> None:
        self._held: collections.OrderedDict[str, bytes] = collections.OrderedDict()
        self._nbytes = 0
        self._lock = threading.Lock()

    def get(self, key: str) -> bytes | None:
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
            return self._held.get(key)

    def put(self, key: str, answer: bytes) -> None:
        if len(answer) > _LONGEST:
            return
        with self._lock:
            self._nbytes += len(answer) - len(self._held.pop(key, b""))
            self._held[key] = answer
            while self._nbytes > _REMEMBERED:
                _, old = self._held.popitem(last=False)
                self._nbytes -= len(old)


def answering(answer: Answer, *, remembered: bool = True) -> Callable[[Request], Any]:
    """The endpoint that gives an answer as JSON, with an ETag by version if it is remembered."""

    def work(asked: Asked, request: Request) -> Response:
        tag = ""
        if remembered:
            shown = [each for each in (asked.shown, asked.other) if each is not None]
            for each in shown:
                each.reader()  # opening it is what gives it a version
            versions = "-".join(f"{each.version}" for each in shown)
            tag = f'"{_BOOT}-{versions}"'
            if request.headers.get("if-none-match") == tag:
                return Response(status_code=304, headers={"etag": tag})
            key = f"{request.url.path}?{request.url.query} {tag}"
            body = asked.place.memory.get(key)
            if body is None:
                body = as_json(answer(asked))
                asked.place.memory.put(key, body)
        else:
            body = as_json(answer(asked))
        headers = {"etag": tag} if tag else {}
        return Response(body, media_type="application/json", headers=headers)

    async def endpoint(request: Request) -> Response:
        asked = Asked(request.app.state.place, request)
        return await run_in_threadpool(guarded, lambda: work(asked, request), asked)

    return endpoint


def guarded(work: Callable[[], Response], asked: Asked) -> Response:
    """What was asked for, or why not, in a sentence."""
    try:
        return work()
    except (TensortapError, OSError) as error:
        return said(_DELETED, 410) if asked.deleted() else _why(error)
    except ValueError as error:
        return said(str(error), 422)
    except MemoryError:
        return said("that is too large for the memory of this machine", 413)
    except Exception as error:
        log.exception("tensortap: a question of the page failed")
        return said(f"an error inside tensortap: {type(error).__name__}: {error}", 500)


def _why(error: TensortapError | OSError) -> Response:
    if isinstance(error, NotFound):
        return said(str(error), 404)
    if isinstance(error, TensortapError):
        return said(str(error), 422)
    return said(f"the run cannot be read: {error}", 410)


def said(sentence: str, status: int) -> Response:
    """An error, as the page shows it."""
    return Response(as_json({"error": sentence}), status, media_type="application/json")


def as_json(value: Any) -> bytes:
    """JSON for the page: arrays as typed arrays in base64, NaN and Inf in lists as null."""
    return _encoder.encode(value)


def _other(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _array(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return str(value)


_TYPES = {"f8", "f4", "i4", "u4", "i2", "u2", "i1", "u1"}


def _array(array: np.ndarray[Any, Any]) -> Any:
    """As plotly.js takes it: its bytes, unless they are few or of a type that it has not."""
    if array.dtype == np.int64 and array.size and abs(array).max() < 2**31:
        array = array.astype(np.int32)
    code = array.dtype.str[1:]
    if array.size < 16 or code not in _TYPES or array.ndim > 2:
        return array.tolist()
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    found = {"dtype": code, "bdata": base64.b64encode(array.tobytes()).decode()}
    if array.ndim > 1:
        found["shape"] = ", ".join(map(str, array.shape))
    return found


_encoder = msgspec.json.Encoder(enc_hook=_other)
