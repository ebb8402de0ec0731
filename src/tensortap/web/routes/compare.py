"""The tab that compares: two runs, in a thread, with progress; the report is that of `compare`."""

from __future__ import annotations

import base64
import hashlib
import re
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from tensortap.compare.api import compare
from tensortap.compare.html import render
from tensortap.compare.report import CompareReport
from tensortap.errors import TensortapError
from tensortap.select import parse_steps
from tensortap.web.entries import Shown, ShownRun
from tensortap.web.jobs import Progress
from tensortap.web.responses import Asked, guarded

_PICTURES = 40


def start(asked: Asked) -> dict[str, Any]:
    """Begin a comparison, or find the one that was made already."""
    a, b = asked.shown, asked.other
    if b is None:
        raise TensortapError("say with which run to compare: other=")
    for each in (a, b):
        each.reader()
    names, steps = asked.text("names"), asked.text("steps")
    if names:
        _check_pattern(names)
    options: dict[str, Any] = {
        "atol": _tolerance(asked.text("atol"), 1e-8),
        "rtol": _tolerance(asked.text("rtol"), 1e-5),
        "names": names or None,
        "steps": parse_steps(steps),
        "allow_missing": asked.flag("allow_missing"),
    }
    sources = _source(a), _source(b)

    def work(progress: Progress) -> tuple[CompareReport, str]:
        report = compare(*sources, progress=progress, **options)
        progress(0, 0)
        return report, render(report, pictures=_PICTURES, progress=progress)

    key = (a.id, a.version, b.id, b.version, str(sorted(options.items(), key=str)))
    job = asked.place.jobs.start(key, work)
    return {"job": job.id, **job.state}


def _source(shown: Shown) -> Any:
    # a path is opened anew: what is compared does not move while it is
    return shown.path if isinstance(shown, ShownRun) else shown.reader()


def status(asked: Asked) -> dict[str, Any]:
    """How far it is; when it is done, what it found."""
    job = asked.place.jobs.get(asked.text("job"))
    found: dict[str, Any] = {"job": job.id, **job.state}
    if job.state["state"] == "done":
        report: CompareReport = job.result[0]
        first = report.first
        found |= {
            "agree": bool(report),
            "counts": report.counts,
            "culprit": report.culprit,
            "compared": report.compared,
            "differences": len(report.differences),
            "missing": len(report.missing),
        }
        if first is not None:
            found["first"] = {
                "name": first.key.name, "kind": first.key.kind, "step": first.key.step,
                "rank": first.key.rank, "call": first.key.call, "line": first.comparison.line,
                "by": first.by,
            }  # fmt: skip
    return found


def cancel(asked: Asked) -> dict[str, Any]:
    """Not wanted any more."""
    job = asked.place.jobs.get(asked.text("job"))
    job.cancelled.set()
    return {"job": job.id}


async def report_page(request: Request) -> Response:
    """The report as a page of its own, which may run the one script that is in it."""

    asked = Asked(request.app.state.place, request)

    def work() -> Response:
        job = asked.place.jobs.get(asked.text("job"))
        if job.state["state"] != "done":
            raise TensortapError("the comparison is not done yet")
        page = _in_theme(job.result[1], asked.text("theme"))
        # the page allows its own script by itself; here it is allowed by its digest alone
        script = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)[-1]
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy = (
            f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
            "frame-ancestors 'self'; base-uri 'none'; form-action 'none'"
        )
        headers = {"content-security-policy": policy}
        return Response(page, media_type="text/html; charset=utf-8", headers=headers)

    return await run_in_threadpool(guarded, work, asked)


def _in_theme(page: str, theme: str) -> str:
    """A report that is light or dark as it is told to be, not as the system is."""
    if theme not in ("light", "dark"):
        return page
    head, data, rest = re.split(
        r'(<script type="application/json".*?</script>)', page, maxsplit=1, flags=re.DOTALL
    )
    asks, always = "(prefers-color-scheme: dark)", "all" if theme == "dark" else "not all"
    scheme = '<meta name="color-scheme" content="light dark">'
    head = head.replace(scheme, scheme.replace("light dark", theme))
    return head.replace(asks, always) + data + rest.replace(asks, always)


def _check_pattern(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise TensortapError(f"names: {pattern!r} is no regular expression: {error}") from None


def _tolerance(text: str, default: float) -> float:
    try:
        return float(text) if text else default
    except ValueError:
        raise TensortapError(f"a tolerance is a number like 1e-5, not {text!r}") from None
