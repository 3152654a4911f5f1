"""`GET /`: the routes of a port, as JSON, and as a page for a browser."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.routing import Route

from rollout import __version__
from rollout.http.endpoints import Endpoints

PAGE = """<!doctype html><meta charset="utf-8"><title>rollout</title>
<style>body {{ font-family: sans-serif; margin: 2em }} td {{ padding: 0 1.5em 0.4em 0; vertical-align: top }}</style>
<h1>{title}</h1><p>Model: {models}</p><table>{rows}</table>
"""


def index(endpoints: Endpoints, routes: Sequence[Route], models: Sequence[str]) -> Route:
    """Make the route that lists `routes`."""
    listed = [
        {"method": method, "path": route.path, "summary": route.endpoint.summary}  # pyright: ignore
        for route in routes
        for method in sorted((route.methods or set()) - {"HEAD"})
    ]
    contents = {"service": f"rollout {__version__}", "models": list(models), "routes": listed}

    async def show(request: Request) -> Any:
        """List the routes."""
        return HTMLResponse(page(contents)) if "text/html" in request.headers.get("accept", "") else contents

    return endpoints.get("/", show)


def page(contents: dict[str, Any]) -> str:
    """Write the list as HTML."""
    rows = "".join(
        f"<tr><td>{each['method']}</td><td><code>{html.escape(each['path'])}</code></td><td>{html.escape(each['summary'])}</td></tr>"
        for each in contents["routes"]
    )
    return PAGE.format(title=html.escape(contents["service"]), models=html.escape(", ".join(contents["models"])), rows=rows)
