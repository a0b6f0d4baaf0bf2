"""The `localllm` command, also as `python -m localllm`.

It imports the command line only in `run`, so that Ctrl-C during these imports ends without a
traceback.
"""

import sys


def run() -> None:
    """Run the command line of this process, and exit with its code."""
    try:
        from localllm.cli.main import run as run_commands

        run_commands()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    run()
