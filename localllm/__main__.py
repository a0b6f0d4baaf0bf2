"""`python -m localllm` is the `localllm` command."""

from localllm.cli.main import run

if __name__ == "__main__":
    run()
