"""The one exception tree: every error a user or a client can meet, with its code, status, exit code
and hint.

    LocalLLMError
    ├── UsageError                    the command line or a setting is wrong             400  exit 2
    │   └── CatalogFileError          a catalog file of the user's says something wrong  400
    ├── RequestError                  a client's request can't be honoured               400  exit 2
    │   ├── UnsupportedError          a known parameter we refuse, with the reason       400
    │   │   ├── NotConstrainableError a tool format can't write that (conversation)      400
    │   │   └── CannotDecideError     a model can't answer by labels (server)            501
    │   ├── ConstraintStuckError      an answer can't be ended as its grammar wants      400
    │   ├── ContextLengthError        prompt + answer do not fit the served context      400
    │   ├── AuthError                 Host, Origin or key refused                        403/401
    │   │   └── KeyRequiredError      the key is missing or wrong (server)               401
    │   ├── MediaTypeError            a body that does not say it is JSON (server)       415
    │   ├── EncodingError             a body packed in a way we do not unpack (server)   415
    │   ├── BodyTooLargeError         a body larger than the server reads (server)       413
    │   ├── SlowBodyError             a body that did not arrive in time (server)        408
    │   ├── MethodError               the path exists, the method does not (server)      405
    │   ├── BadJsonError              a body that is not JSON as we take it (server)     400
    │   └── TemplateError             the template refuses or breaks (conversation)      400
    ├── NotFoundError                 unknown device, conversation, route                404  exit 3
    │   ├── ModelNotFoundError        no model of that name here or in the catalog       404
    │   ├── BuildNotFoundError        no build of llama.cpp of that name (setup)         404
    │   ├── DeviceNotFoundError       no device of that name in the table (device)       404
    │   ├── RouteNotFoundError        no such path (server)                              404
    │   ├── PreviousResponseError     a stored response that is not here (server)        404
    │   ├── StreamGoneError           a stream that can't be joined any more (server)    404
    │   └── ConversationNotFoundError a kept conversation that is not here (server)      404
    ├── ModelFileError                a file is missing, truncated, not a model          422  exit 4
    ├── DoesNotFitError               the plan needs more memory than the machine has    507  exit 5
    ├── BackendError                  the engine's native side failed                    500  exit 6
    │   ├── BackendMissingError       the package for this backend is not installed      500
    │   ├── OtherMachineGoneError     a machine that holds layers does not answer        503
    │   └── WorkerDiedError           the worker process ended under a request           503
    ├── BusyError                     queue full: retry later                            503  exit 7
    ├── RateLimitError                a key has used what it may now (server)            429  exit 7
    ├── UpstreamError                 another server can't be reached, or broke off (server) 502
                                      exit 6
    ├── PortInUseError                the port is taken                                  -    exit 8
    ├── DownloadError                 the hub or the disk failed                         502  exit 9
    │   └── HubUnreachableError       the hub can't be asked now (library)               502
    ├── ServerUnreachableError        no server answers, or it went away                 500  exit 6
    ├── SetupError                    a build can't be made here, or is broken (setup)   500  exit 6
    │   └── SlowerBuildError          it works, and slower than the one before (setup)   500
    ├── ServiceError                  the service manager refused, or is not there (service)  500
                                      exit 1
    ├── ChildError                    a child process of ours gave no answer (limited_child) 503
    │   │                             exit 1
    │   ├── OverLimitError            its work took more time or memory than it may
    │   └── RefusedError              its work can't be done, for the reason it gives
    ├── DeviceUnreadableError         the machine does not say what it has (device)      500  exit 1
    └── HistoryError                  the chats' file can't be used (conversation)       500  exit 1
        └── TurnGoneError             another window removed what is gone on from (conversation)
                                      500  exit 1

Rooms raise these across their borders, never a bare ValueError; a leaf only one room raises stands
in that room (named in brackets). The catalog and the backends may import nothing of ours: their own
errors become these at one door each (library/catalog.py, engine/worker/child_pipe.py). The CLI prints
`error: MESSAGE` and `hint: HINT` and exits with `exit_code`; the server sends `to_openai()` with
`http_status`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar


class LocalLLMError(Exception):
    """Base of every error that reaches a user. `message` says what happened and why, `hint` what to
    do next."""

    code: ClassVar[str] = "internal_error"
    type: ClassVar[str] = "server_error"
    http_status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1
    default_hint: ClassVar[str] = ""
    default_retry_after_s: ClassVar[float | None] = None

    def __init_subclass__(cls, **facts: Any) -> None:
        """The head of a kind's class says these of it."""
        super().__init_subclass__()
        for name, fact in facts.items():
            setattr(cls, name, fact)

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.retry_after_s = self.default_retry_after_s if retry_after_s is None else retry_after_s
        self.message = message
        self.hint = self.default_hint if hint is None else hint
        self.param = param

    @property
    def openai_message(self) -> str:
        """What to_openai() says happened."""
        return self.message

    def to_openai(self) -> dict[str, Any]:
        """The error object every HTTP face sends: OpenAI's shape plus our `hint`."""
        body = {
            "message": self.openai_message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        if self.hint:
            body["hint"] = self.hint
        return {"error": body}


class UsageError(
    LocalLLMError, code="usage_error", type="invalid_request_error", http_status=400, exit_code=2
):
    """The command line or a setting is wrong."""


class CatalogFileError(UsageError, code="bad_catalog_file"):
    """A catalog file can't be read, or does not say what a model needs to say: one of the user's,
    nearly always."""


class RequestError(
    LocalLLMError,
    code="invalid_request",
    type="invalid_request_error",
    http_status=400,
    exit_code=2,
):
    """A client's request can't be honoured as sent."""


class UnsupportedError(RequestError, code="unsupported_parameter"):
    """A parameter we know and do not honour: refused with the reason instead of ignored."""


class ConstraintStuckError(
    RequestError,
    code="constraint_stuck",
    default_hint=(
        "what was written so far is no answer; loosen the schema, the grammar or the logit_bias"
    ),
):
    """An answer under a grammar came to where nothing may follow, and is not complete."""


class ContextLengthError(
    RequestError,
    code="context_length_exceeded",
    default_hint="shorten the conversation, or serve with a larger --context",
):
    """The prompt, or the prompt and its answer, do not fit the served context. `counts` are the
    tokens of the prompt and of the window, where they are known: some clients read them out of
    their dialect's own words."""

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        param: str | None = None,
        counts: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(message, hint=hint, param=param)
        self.counts = counts

    @property
    def openai_message(self) -> str:
        """OpenAI's words where the counts are known, before our own: LiteLLM and others know a full
        window by them alone, and shorten the conversation then."""
        if self.counts is None:
            return self.message
        tokens, window = self.counts
        return (
            f"This model's maximum context length is {window} tokens. However, your messages "
            f"resulted in {tokens} tokens. "
            f"Please reduce the length of the messages ({self.message})."
        )


class AuthError(RequestError, code="forbidden", type="authentication_error", http_status=403):
    """The Host, the Origin or the API key is not accepted."""


class NotFoundError(
    LocalLLMError, code="not_found", type="invalid_request_error", http_status=404, exit_code=3
):
    """A model, device, conversation or route nobody here knows."""


class ModelNotFoundError(NotFoundError, code="model_not_found"):
    """No model of that name on this disk or in the catalog."""


class ModelFileError(
    LocalLLMError,
    code="bad_model_file",
    type="invalid_request_error",
    http_status=422,
    exit_code=4,
    default_hint="download the file again, or check it with `localllm models verify`",
):
    """A model file is missing, truncated, corrupt or of another format."""


class DoesNotFitError(
    LocalLLMError,
    code="does_not_fit",
    type="insufficient_memory_error",
    http_status=507,
    exit_code=5,
    default_hint="try a smaller --context, a smaller quant, or see `localllm recommend`",
):
    """Running this plan would need more memory than the machine can give."""


class BackendError(LocalLLMError, code="backend_error", exit_code=6):
    """The engine's native side refused or failed."""


class BackendMissingError(
    BackendError,
    code="backend_missing",
    default_hint=(
        "install localllm again with the engine's packages: see README.md, What runs where"
    ),
):
    """The package this backend stands on is not installed."""


class WorkerDiedError(
    BackendError,
    code="worker_died",
    http_status=503,
    default_hint="send the request again: the model is reloaded automatically",
):
    """The worker process ended while it held a request; the server reloads the model on the next
    one."""


class OtherMachineGoneError(
    BackendError,
    code="other_machine_gone",
    http_status=503,
    default_hint=(
        "start `localllm worker` there: the next request loads the model. Both ends need a build "
        "with RPC of the same "
        "release (`localllm setup --rpc`)"
    ),
):
    """A machine that holds layers of a model (`--with`) can't be had. The next request asks for it
    again."""


class BusyError(
    LocalLLMError,
    code="server_busy",
    http_status=503,
    exit_code=7,
    default_hint="retry after the time given in Retry-After",
    default_retry_after_s=2,
):
    """The queue is full. `retry_after_s` says when to try again."""


class PortInUseError(
    LocalLLMError,
    code="port_in_use",
    exit_code=8,
    default_hint="choose another with --port, or stop the program that holds it",
):
    """Another program listens on the port."""


class DownloadError(LocalLLMError, code="download_failed", http_status=502, exit_code=9):
    """The hub, the network or the disk failed while fetching a model."""


class ServerUnreachableError(
    LocalLLMError,
    code="server_unreachable",
    exit_code=6,
    default_hint="start one with `localllm serve`, or name its address with --url",
):
    """No server answers at the address, or it went away while it was answering."""


def by_code(
    code: str,
    message: str,
    *,
    hint: str | None = None,
    param: str | None = None,
    counts: tuple[int, int] | None = None,
) -> LocalLLMError:
    """Rebuild an error that crossed a process border from its `code` (unknown codes become
    BackendError)."""

    cls = next(
        (kind for kind in _kinds(LocalLLMError) if kind.__dict__.get("code") == code), BackendError
    )
    if issubclass(cls, ContextLengthError):
        return cls(message, hint=hint, param=param, counts=counts)
    return cls(message, hint=hint, param=param)


def _kinds(cls: type[LocalLLMError]) -> Iterator[type[LocalLLMError]]:
    yield cls
    for kind in cls.__subclasses__():
        yield from _kinds(kind)
