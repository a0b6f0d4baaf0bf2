"""The paths of a dialect: what answers each, and what the OpenAPI document says of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from inspect import getdoc
from types import MappingProxyType
from typing import Any, TypeAlias

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

# Answers a request with a Response, or with the value that is sent as JSON.
Endpoint: TypeAlias = Callable[[Request], Awaitable[Any]]


def answer_of(
    media_type: str = "application/json",
    kind: str = "object",
    others: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """What the OpenAPI document says of a path that reads no body: the JSON type of its answer, and
    `others` by their status."""
    content = {media_type: {"schema": {"type": kind}}}
    return {"responses": {"200": {"description": "the answer", "content": content}, **others}}


def query(*names: str) -> dict[str, Any]:
    """What the OpenAPI document says of optional texts behind a path's question mark."""
    return {
        "parameters": [
            {"name": name, "in": "query", "schema": {"type": "string"}} for name in names
        ]
    }


@dataclass(frozen=True, slots=True)
class Path:
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
        super().__init__()
        self.tag = tag

    def add(
        self,
        method: str,
        path: str,
        endpoint: Endpoint,
        about: str = "",
        described: Mapping[str, Any] | None = None,
    ) -> None:
        """Have `endpoint` answer `path`."""
        self.append(Path(method, path, endpoint, self.tag, about, described or answer_of()))

    def answers(
        self, method: str, *paths: str, listed: bool = True, **described: Any
    ) -> Callable[[Endpoint], Endpoint]:
        """A decorator: the function answers `paths`, of which the first is `listed` with the
        function's docstring."""

        def added(endpoint: Endpoint) -> Endpoint:
            for path in paths:
                about = getdoc(endpoint) if listed and path == paths[0] else ""
                self.add(method, path, endpoint, about or "", {**answer_of(), **described})
            return endpoint

        return added
