"""The tab Compare: a job that compares two runs, and its HTML report."""

from __future__ import annotations

import base64
import hashlib
import re
from typing import Any

from starlette.responses import Response

from tensortap.core.arguments import parse_steps
from tensortap.core.errors import TensortapError
from tensortap.page.catalog import RunEntry
from tensortap.page.jobs import Job, Progress
from tensortap.page.responses import PageRequest, PageRoute
from tensortap.rooms.compare.api import compare
from tensortap.rooms.compare.html import render
from tensortap.rooms.compare.report import CompareReport

_DARK_QUERY = "(prefers-color-scheme: dark)"
_COLOR_SCHEME = '<meta name="color-scheme" content="{}">'


def start(request: PageRequest) -> dict[str, Any]:
    """Start a comparison, or find the same one."""
    entries = request.entries()
    if len(entries) != 2:
        raise TensortapError("name the run to compare with: other=")
    readers = [entry.reader() for entry in entries]
    options: dict[str, Any] = {
        "atol": _tolerance(request.text("atol")),
        "rtol": _tolerance(request.text("rtol")),
        "names": request.pattern("names"),
        "steps": parse_steps(request.text("steps")),
    }
    # a path is opened anew: what is compared must not change meanwhile
    sources = [
        entry.path if isinstance(entry, RunEntry) else reader
        for entry, reader in zip(entries, readers, strict=True)
    ]

    def work(progress: Progress) -> tuple[CompareReport, str]:
        report: Any = compare(*sources, progress=progress, **options)
        progress(0, 0)
        return report, render(report)

    versions = [(entry.id, entry.version) for entry in entries]
    key = versions, request.text("names"), options["atol"], options["rtol"], options["steps"]
    job = request.context.jobs.start(str(key), work)
    return {"job": job.id, **job.state}


def _tolerance(text: str) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        raise TensortapError(f"a tolerance must be a number like 1e-5, got {text!r}") from None


def _job(request: PageRequest) -> Job:
    return request.context.jobs.get(request.text("job"))


def status(request: PageRequest) -> dict[str, Any]:
    """Return the state of a comparison, and when it is done the first difference."""
    job = _job(request)
    answer: dict[str, Any] = {"job": job.id, **job.state}
    if job.state["state"] == "done":
        report: CompareReport = job.result[0]
        answer["agree"] = bool(report)
        answer["report"] = request.context.access.signed(
            "/api/compare/report", job=job.id, theme=request.theme
        )
        if report.first is not None:
            key = report.first.key
            answer["first"] = {
                "name": key.name, "kind": key.kind, "step": key.step, "rank": key.rank,
            }  # fmt: skip
    return answer


def cancel(request: PageRequest) -> dict[str, Any]:
    """Cancel a comparison."""
    job = _job(request)
    job.cancelled.set()
    return {"job": job.id}


def report_page(request: PageRequest) -> Response:
    """Return the report as a page of its own, which may run only the scripts inside it."""
    job = _job(request)
    if job.state["state"] != "done":
        raise TensortapError("the comparison is not done yet")
    page = _with_theme(job.result[1], request.theme)
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(each.encode()).digest()) for each in scripts)
    allowed = " ".join(f"'sha256-{digest.decode()}'" for digest in digests)
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "img-src data: blob:; frame-ancestors 'self'; base-uri 'none'; form-action 'none'"
    )
    headers = {"content-security-policy": policy}
    return Response(page, media_type="text/html; charset=utf-8", headers=headers)


def _with_theme(page: str, theme: str) -> str:
    """Return a report with a fixed theme, instead of that of the system."""
    head, data, rest = re.split(
        r'(<script type="application/json".*?</script>)', page, maxsplit=1, flags=re.DOTALL
    )
    media = "all" if theme == "dark" else "not all"
    head = head.replace(_COLOR_SCHEME.format("light dark"), _COLOR_SCHEME.format(theme))
    return head.replace(_DARK_QUERY, media) + data + rest.replace(_DARK_QUERY, media)


ROUTES = (
    PageRoute("compare", status, cached=False),
    PageRoute("compare/start", start, cached=False, method="POST"),
    PageRoute("compare/cancel", cancel, cached=False, method="POST"),
    PageRoute("compare/report", report_page, cached=False),
)
