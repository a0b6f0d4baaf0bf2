"""The paths of a dialect: what answers each, and what the OpenAPI document says of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from inspect import getdoc
from typing import Any, NamedTuple, TypeAlias

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

# Answers a request with a Response, or with the value that is sent as JSON.
Endpoint: TypeAlias = Callable[[Request], Awaitable[Any]]


class Path(NamedTuple):
    """One path by one method. `about` is its description in the OpenAPI document, listed under
    `tag` with all that is `described` (its answer, its body, its parameters); without it the path
    is not listed."""

    method: str
    path: str
    endpoint: Endpoint
    tag: str
    about: str
    described: Mapping[str, Any]

    def route(self) -> Route:
        """It as the web framework takes it."""

        async def respond(request: Request) -> Response:
            answer = await self.endpoint(request)
            return answer if isinstance(answer, Response) else JSONResponse(answer)

        return Route(self.path, respond, methods=[self.method])


class Paths(list[Path]):
    """The paths of one dialect, listed under `tag`."""

    def __init__(self, tag: str) -> None:
        self.tag = tag

    def answers(
        self, method: str, *paths: str, about: str | None = None, **described: Any
    ) -> Callable[[Endpoint], Endpoint]:
        """A decorator: the function answers `paths`. The first is listed with `about` ("": it is
        not), else the function's docstring, and with what is `described`."""

        def added(endpoint: Endpoint) -> Endpoint:
            says = getdoc(endpoint) or "" if about is None else about
            for path in paths:
                listed = says if path == paths[0] else ""
                self.append(Path(method, path, endpoint, self.tag, listed, described))
            return endpoint

        return added
