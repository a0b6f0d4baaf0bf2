"""The command line: one short file per command. Heavy imports are inside the commands."""

from localllm_catalog import readable_calls


def _reads_calls(template: str) -> bool:
    from localllm.conversation.tools import has_unknown_format

    return not has_unknown_format(template)


readable_calls.read_calls_with(_reads_calls)
