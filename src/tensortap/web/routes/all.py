"""All addresses of the page, in its order."""

from __future__ import annotations

from starlette.routing import Route

from tensortap.web.responses import answering
from tensortap.web.routes import compare, figures, runs, tensors
from tensortap.web.routes import texts as words


def routes() -> list[Route]:
    """The addresses below ``/api``, and what answers there."""
    get = [
        ("library", answering(runs.library, remembered=False)),
        ("run", answering(runs.run)),
        ("held", answering(runs.held)),
        ("sparklines", answering(figures.sparklines)),
        ("training", answering(figures.training)),
        ("overview", answering(figures.overview)),
        ("lines", answering(figures.lines)),
        ("exponents", answering(figures.exponents)),
        ("tensor", answering(tensors.tensor)),
        ("tensor.npy", tensors.download),
        ("alerts", answering(words.alerts)),
        ("provenance", answering(words.provenance)),
        ("receipt", answering(words.receipt, remembered=False)),
        ("compare", answering(compare.status, remembered=False)),
        ("compare/report", compare.report_page),
    ]
    post = [
        ("compare/start", answering(compare.start, remembered=False)),
        ("compare/cancel", answering(compare.cancel, remembered=False)),
    ]
    return [
        *(Route(f"/api/{name}", endpoint, methods=["GET"]) for name, endpoint in get),
        *(Route(f"/api/{name}", endpoint, methods=["POST"]) for name, endpoint in post),
    ]
