"""The paths of a dialect: what answers each, and what the OpenAPI document says of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from inspect import getdoc
from typing import Any, TypeAlias

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

# Answers a request with a Response, or with the value that is sent as JSON.
Endpoint: TypeAlias = Callable[[Request], Awaitable[Any]]


class Paths(list[Route]):
    """The paths of one dialect as the web framework takes them; and what the OpenAPI document says
    of those it lists, under `tag`, by path and method."""

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self.listed: dict[tuple[str, str], Mapping[str, Any]] = {}

    def answers(
        self, method: str, *paths: str, about: str | None = None, **described: Any
    ) -> Callable[[Endpoint], Endpoint]:
        """A decorator: the function answers `paths`. The first is listed with `about` ("": it is
        not), else the function's docstring, and with what is `described` (its answer, its body, its
        parameters)."""

        def added(endpoint: Endpoint) -> Endpoint:
            async def respond(request: Request) -> Response:
                answer = await endpoint(request)
                if isinstance(answer, Response):
                    return answer
                return JSONResponse(answer)

            self.extend(Route(path, respond, methods=[method]) for path in paths)
            description = getdoc(endpoint) if about is None else about
            if description:
                operation = {"tags": [self.tag], "description": description, **described}
                self.listed[paths[0], method] = operation
            return endpoint

        return added
