"""The exception tree: every error that reaches a user or a client, with its code, HTTP status, exit
code and hint.

    LocalLLMError
    ├── UsageError                    the command line or a setting is wrong             400  exit 2
    │   └── CatalogFileError          a catalog file of the user is invalid              400
    ├── RequestError                  a client's request can't be served                 400  exit 2
    │   ├── UnsupportedError          a known parameter that is rejected, with a reason  400
    │   │   ├── NotConstrainableError a tool format can't express it (conversation)      400
    │   │   └── CannotDecideError     a model can't answer by labels (server)            501
    │   ├── ConstraintStuckError      the grammar's answer can't be completed            400
    │   ├── NoSummaryError            the model wrote no summary to compact to (server)  400
    │   ├── ContextLengthError        prompt + answer do not fit the served context      400
    │   ├── AuthError                 Host, Origin or key refused                        403/401
    │   │   └── KeyRequiredError      the key is missing or wrong (server)               401
    │   ├── MediaTypeError            the content type of a body is not JSON (server)    415
    │   ├── EncodingError             the content encoding is not supported (server)     415
    │   ├── BodyTooLargeError         the body is larger than the limit (server)         413
    │   ├── SlowBodyError             the body did not arrive in time (server)           408
    │   ├── MethodError               the path exists, the method does not (server)      405
    │   ├── KvDiffersError            the KV of two servers can't be exchanged (server)       409
    │   ├── TooManyContainersError    JSON has too many lists and objects (json_limits)  400
    │   ├── TooManyValuesError        JSON has too many values (json_limits)             400
    │   ├── TooDeepError              JSON is nested too deeply (json_limits)            400
    │   ├── BadJsonError              the body is not JSON that we accept (server)       400
    │   └── TemplateError             the chat template raises an error (conversation)   400
    ├── NotFoundError                 unknown device, conversation, route                404  exit 3
    │   ├── ModelNotFoundError        no model of that name here or in the catalog       404
    │   ├── BuildNotFoundError        no build of llama.cpp of that name (setup)         404
    │   ├── ReleaseNotFoundError      no release of llama.cpp with that tag (cli)        404
    │   ├── DeviceNotFoundError       no device of that name in the table (device)       404
    │   ├── RouteNotFoundError        no such path (server)                              404
    │   ├── PreviousResponseError     the stored response does not exist (server)        404
    │   ├── StreamGoneError           the stream can't be resumed any more (server)      404
    │   └── ConversationNotFoundError the stored conversation does not exist (server)    404
    ├── ModelFileError                a file is missing, truncated, not a model          422  exit 4
    ├── DoesNotFitError               the plan needs more memory than the machine has    507  exit 5
    ├── BackendError                  the engine's native code failed                    500  exit 6
    │   ├── BackendMissingError       the package for this backend is not installed      500
    │   ├── LibraryError              the library of llama.cpp can't be used             500
    │   ├── EngineTooOldError         llama.cpp can't read the model's architecture (load) 500
    │   ├── OtherMachineGoneError     a machine that holds layers does not answer        503
    │   └── WorkerDiedError           the worker process ended during a request          503
    ├── BusyError                     queue full: retry later                            503  exit 7
    ├── RateLimitError                a key has used up its quota for now (server)       429  exit 7
    ├── TransferError                 a transfer of KV ended early (engine)              502  exit 6
    │   └── BadFrameError             another server sent no valid frame of KV           502
    ├── UpstreamError                 another server is unreachable or disconnected (server) 502
                                      exit 6
    ├── PortInUseError                the port is taken                                  -    exit 8
    ├── DownloadError                 the hub or the disk failed                         502  exit 9
    │   └── HubUnreachableError       the hub can't be reached now (library)             502
    ├── ServerUnreachableError        no server answers, or it went away                 500  exit 6
    ├── MalformedError                JSON of another program is unusable (foreign_json) 502  exit 6
    ├── SetupError                    a build fails, or is broken (setup)                500  exit 6
    │   └── SlowerBuildError          the build works but is slower than before (setup)  500
    ├── ServiceError                  the service manager refused or is missing (service)  500
                                      exit 1
    ├── ChildError                    a child process gave no answer (limited_child)     503
    │   │                             exit 1
    │   ├── OverLimitError            its work exceeded the limit of time or memory
    │   └── RefusedError              it refused the work and gave the reason
    ├── DeviceUnreadableError         the machine's hardware can't be read (device)      500  exit 1
    └── HistoryError                  the file of the chats can't be used (conversation) 500  exit 1
        └── TurnGoneError             another window removed the previous turn (conversation)
                                      500  exit 1

Packages raise these errors to each other, never a bare ValueError. An error that only one package
raises is defined in that package, which the tree names in brackets. The catalog and the backends
may import nothing from localllm. Their errors are converted in one module each (library/catalog.py,
engine/worker/child_pipe.py). The CLI prints `error: MESSAGE` and `hint: HINT` and exits with
`exit_code`. The server sends `to_openai()` with `http_status`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar


class LocalLLMError(Exception):
    """Base of every error that reaches a user.

    `message` states the failure and its cause. `hint` suggests a next step.
    """

    code: ClassVar[str] = "internal_error"
    type: ClassVar[str] = "server_error"
    http_status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1
    default_hint: ClassVar[str] = ""
    default_retry_after_s: ClassVar[float | None] = None

    def __init_subclass__(cls, **facts: Any) -> None:
        """Set class attributes from the keyword arguments in the class statement."""
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
        """The message that to_openai() sends."""
        return self.message

    def to_openai(self) -> dict[str, Any]:
        """The error object of every HTTP API: OpenAI's shape plus our `hint`."""
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
    """A catalog file can't be read or lacks required fields. It is nearly always one of the
    user's."""


class RequestError(
    LocalLLMError,
    code="invalid_request",
    type="invalid_request_error",
    http_status=400,
    exit_code=2,
):
    """A client's request can't be served as sent."""


class UnsupportedError(RequestError, code="unsupported_parameter"):
    """A known parameter that is not supported: rejected with the reason instead of ignored."""


class ConstraintStuckError(
    RequestError,
    code="constraint_stuck",
    default_hint=(
        "discard the text generated so far, and loosen the schema, the grammar or the logit_bias"
    ),
):
    """The grammar allows no further token, but the answer is incomplete."""


class ContextLengthError(
    RequestError,
    code="context_length_exceeded",
    default_hint="shorten the conversation, or serve with a larger --context",
):
    """The prompt alone, or with its answer, does not fit the served context.

    `counts` are the tokens of the prompt and of the context window, if known. Some clients parse
    them from the error text of their own API.
    """

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

    def to_openai(self) -> dict[str, Any]:
        """OpenAI's shape with the type and the counts of llama.cpp's server."""
        body = super().to_openai()
        if self.counts is not None:
            tokens, n_ctx = self.counts
            body["error"] |= {
                "type": "exceed_context_size_error", "n_prompt_tokens": tokens, "n_ctx": n_ctx
            }  # fmt: skip
        return body

    @property
    def openai_message(self) -> str:
        """OpenAI's wording, followed by our own, if the counts are known.

        LiteLLM and other clients recognise a full context only by OpenAI's wording. They then
        shorten the conversation.
        """
        if self.counts is None:
            return self.message
        tokens, window = self.counts
        return (
            f"This model's maximum context length is {window} tokens. However, your messages "
            f"resulted in {tokens} tokens, which exceeds the available context size. "
            f"Please reduce the length of the messages ({self.message})."
        )


class AuthError(RequestError, code="forbidden", type="authentication_error", http_status=403):
    """The Host, the Origin or the API key is not accepted."""


class NotFoundError(
    LocalLLMError, code="not_found", type="invalid_request_error", http_status=404, exit_code=3
):
    """An unknown model, device, conversation or route."""


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
    """This plan would need more memory than the machine can provide."""


class BackendError(LocalLLMError, code="backend_error", exit_code=6):
    """The engine's native code refused or failed."""


class BackendMissingError(
    BackendError,
    code="backend_missing",
    default_hint=("install localllm again with the engine's packages (README.md, Install)"),
):
    """The package of this backend is not installed."""


class LibraryError(BackendError, code="library_unusable"):
    """The library of llama.cpp can't be loaded, or has another layout than its headers declare."""


class WorkerDiedError(
    BackendError,
    code="worker_died",
    http_status=503,
    default_hint="send the request again: the model is reloaded automatically",
):
    """The worker process ended during a request. The next request makes the server reload the
    model."""


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
    """A machine that holds layers of a model (`--with`) is unreachable.

    The next request tries to connect to it again.
    """


class BusyError(
    LocalLLMError,
    code="server_busy",
    http_status=503,
    exit_code=7,
    default_hint="retry after the time given in Retry-After",
    default_retry_after_s=2,
):
    """The queue is full. `retry_after_s` is the time in seconds until a retry makes sense."""


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
    """No server answers at the address, or it went away during an answer."""


def by_code(
    code: str,
    message: str,
    *,
    hint: str | None = None,
    param: str | None = None,
    counts: tuple[int, int] | None = None,
) -> LocalLLMError:
    """Rebuild an error from its `code` after it crossed a process boundary.

    Unknown codes become BackendError.
    """

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
