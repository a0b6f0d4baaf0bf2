"""The `localllm` command, also as `python -m localllm`.

It imports the command line only in `run`, so that Ctrl-C during these imports ends without a
traceback.
"""

import _thread
import sys
import time

# By then, the call that dropped an interrupt has returned.
_AGAIN_AFTER_S = 0.01


def run() -> None:
    """Run the command line of this process, and exit with its code."""
    sys.unraisablehook = _repeat_interrupt
    try:
        from localllm.cli.main import run as run_commands

        run_commands()
    except KeyboardInterrupt:
        sys.exit(130)


def _repeat_interrupt(dropped: "sys.UnraisableHookArgs") -> None:
    """Interrupt the main thread again if Python dropped an interrupt.

    Python prints and drops the exceptions of destructors and of callbacks of weak references. A
    Ctrl-C at that moment would be lost.
    """
    if dropped.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(dropped)
    elif not sys.is_finalizing():
        _thread.start_new_thread(_interrupt_later, ())


def _interrupt_later() -> None:
    time.sleep(_AGAIN_AFTER_S)
    _thread.interrupt_main()


if __name__ == "__main__":
    run()
