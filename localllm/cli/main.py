"""Run the command line, and turn errors into messages and exit codes."""

from __future__ import annotations

import gc
import os
import sys
from typing import Any

from localllm.cli.familiar_commands import HELP, translated
from localllm.errors import LocalLLMError, UsageError

_COMPLETING = "_LOCALLLM_COMPLETE"  # set by the shell's completion


def report(error: LocalLLMError) -> int:
    """Print an error as all commands do (on stderr, with its hint). Returns its exit code."""
    print(f"error: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"\nhint: {error.hint}", file=sys.stderr)
    return error.exit_code


def run(argv: list[str] | None = None) -> Any:
    """Entry point of the `localllm` script.

    Users get no tracebacks, and the terminal gets no control characters.
    """
    from localllm.plain_output import give_up_stdout, only_plain

    code: Any = 0
    typed = sys.argv[1:] if argv is None else argv
    # click's help texts have at least 50 columns.
    with only_plain(wraps_stdout=any(word in HELP for word in typed)):
        try:
            try:
                _run(argv)
            except SystemExit as exit_error:
                code = exit_error.code
            sys.stdout.flush()
        except BrokenPipeError:
            # `localllm … | head` closed our output. That is no error.
            sys.stderr.close()
        except OSError as e:
            give_up_stdout()
            # Errors of files that commands open include the file's name. Errors of our own streams
            # don't.
            error = LocalLLMError(
                f"{e.filename or 'the output'} can't be used: {e.strerror or e}",
                hint="check its permissions and the free space of its disk",
            )
            code = report(error)
    sys.exit(code)


def _only_command(typed: list[str]) -> str | None:
    """Return the name of the one command that must be built; None if all must be."""
    if typed:
        return typed[0]
    if _COMPLETING in os.environ:
        return None
    return "chat"  # the default command


def _run_command(typed: list[str], argv: list[str] | None) -> None:
    from localllm.cli.root_command import command_line

    command_line(_only_command(typed))(args=argv)


def _run(argv: list[str] | None) -> None:
    from localllm.plain_output import is_text
    from localllm.settings import mistyped

    for warning in mistyped():
        print(f"warning: {warning}", file=sys.stderr)
    # Objects made at startup live until the end. Garbage collection over them took a tenth of the
    # time of `recommend`.
    gc.disable()
    typed = sys.argv[1:] if argv is None else argv
    try:
        arguments = translated(typed)
        if arguments != typed:
            argv = arguments
        if arguments[:1] == ["serve"] and not any(word in HELP for word in arguments):
            from localllm.cli.serve.first_worker import worker_started

            with worker_started():
                _run_command(arguments, argv)
        else:
            _run_command(arguments, argv)
    except LocalLLMError as e:
        sys.exit(report(e))
    except KeyboardInterrupt:
        sys.exit(130)
    except UnicodeEncodeError:
        if all(is_text(word) for word in typed):
            raise
        warning = "the command line is not valid UTF-8"
        sys.exit(report(UsageError(warning, hint="type it in UTF-8, or pipe it in")))
    finally:
        if argv is None:
            gc.freeze()  # The process ends now. Collecting its garbage took 40 ms.
        else:
            gc.enable()


if __name__ == "__main__":
    run()
