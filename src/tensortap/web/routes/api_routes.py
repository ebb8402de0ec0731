"""All endpoints below ``/api``."""

from __future__ import annotations

from starlette.routing import Route

from tensortap.web.responses import endpoint, json_endpoint
from tensortap.web.routes import alerts, catalog, compare, figures, provenance, receipt, tensors


def api_routes() -> list[Route]:
    """Return the routes below ``/api``."""
    cached = {
        "run": catalog.run,
        "tensor_steps": catalog.tensor_steps,
        "sparklines": figures.sparklines,
        "training": figures.training,
        "overview": figures.overview,
        "lines": figures.lines,
        "exponents": figures.exponents,
        "tensor": tensors.tensor,
        "alerts": alerts.alerts,
        "provenance": provenance.provenance,
    }
    uncached = {
        "catalog": catalog.catalog,
        "receipt": receipt.receipt,
        "compare": compare.status,
    }
    get = {name: json_endpoint(handler) for name, handler in cached.items()}
    get |= {name: json_endpoint(handler, cached=False) for name, handler in uncached.items()}
    get["tensor.npy"] = endpoint(tensors.download)
    get["compare/report"] = endpoint(compare.report_page)
    post = {
        "compare/start": json_endpoint(compare.start, cached=False),
        "compare/cancel": json_endpoint(compare.cancel, cached=False),
    }
    return [
        Route(f"/api/{name}", run, methods=[method])
        for method, endpoints in (("GET", get), ("POST", post))
        for name, run in endpoints.items()
    ]
