"""The paths of a dialect, with their handlers and their OpenAPI descriptions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from inspect import getdoc
from typing import Any, TypeAlias

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

# Answers a request with a Response, or with a value that is sent as JSON.
Endpoint: TypeAlias = Callable[[Request], Awaitable[Any]]


class Paths(list[Route]):
    """The routes of one dialect, as Starlette takes them. `listed` holds OpenAPI descriptions by
    path and method, under `tag`."""

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self.listed: dict[tuple[str, str], Mapping[str, Any]] = {}

    def answers(
        self, method: str, *paths: str, about: str | None = None, **described: Any
    ) -> Callable[[Endpoint], Endpoint]:
        """Return a decorator that makes a function the handler of `paths`.

        The OpenAPI document lists the first path. Its description is `about`, or by default the
        function's docstring; "" omits the path. `described` adds the response, the body or the
        parameters."""

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


def answer_of(media_type: str = "application/json", kind: str = "object") -> dict[str, Any]:
    """Return OpenAPI's `responses` for a route without a body. `kind` is the JSON type of its
    answer."""
    content = {media_type: {"schema": {"type": kind}}}
    return {"200": {"description": "the answer", "content": content}}
