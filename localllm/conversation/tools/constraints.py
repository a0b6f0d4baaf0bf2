"""The grammars of tool calls: begun by the model, forced, or as an alternative to an answer with a
schema.

Text before a trigger is unconstrained. After the model has written the opening marker, the engine
appends the text that always follows it. The rest of the call is generated under the grammar.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from localllm.conversation.tools.base import (
    Grammar,
    GrammarTrigger,
    NotConstrainableError,
    Tool,
    ToolFormat,
    parameters_of,
)
from localllm.conversation.tools.lark import json_value, spelled, text
from localllm.conversation.tools.prompt import Choice
from localllm.conversation.tools.schemas import arguments, one_call


def triggers_of(
    style: ToolFormat, template: str, tools: Sequence[Tool]
) -> dict[str, GrammarTrigger]:
    """The triggers of `style`: each opening of a call, with the grammar that follows it.

    The opening of a reply's first call comes before those of further calls. {} if no grammar
    describes the calls; they are then read as the model writes them.
    """
    if not tools:
        return {}
    try:
        return style.triggers(template, [parameters_of(t) for t in tools])
    except NotConstrainableError:
        return {}


def answer_or_call(
    style: ToolFormat, template: str, tools: Sequence[Tool], schema: str, marker_id: int | None
) -> str | None:
    """A Lark grammar of an answer that matches the JSON schema `schema`, or of one tool call.

    None if the format's calls can't be described. `marker_id` is the opening marker's token, if it
    is a single token.
    """
    if style.unmarked_call is not None:
        call: str | None = f"call_: {style.unmarked_call([parameters_of(t) for t in tools])}\n"
    else:
        call = _marked_call(style, template, tools, marker_id)
    if call is None:
        return None
    choices = "answer | call_"
    answer = json_value(json.loads(schema))
    if style.framed is not None:
        return style.framed(choices, answer) + call
    return f"start: {choices}\nanswer: {answer}\n{call}"


def framed_answer(style: ToolFormat, schema: str) -> str | None:
    """A Lark grammar of an answer that matches the JSON schema `schema`.

    None if the format adds no frame, so that the schema is enough.
    """
    if style.framed is None:
        return None
    return style.framed("answer", json_value(json.loads(schema)))


def _marked_call(
    style: ToolFormat, template: str, tools: Sequence[Tool], marker_id: int | None
) -> str | None:
    """The rules of `call_`: the first marker, then the text that its grammar allows."""
    triggers = triggers_of(style, template, tools)
    if not triggers:
        return None
    opening, trigger = next(iter(triggers.items()))
    if opening not in style.markers:
        # Each function has its own opening here. It may contain a control token that grammars can't
        # spell.
        return None
    if style.named_tokens:
        opening_lark = f"{spelled(opening)} {spelled(trigger.lead)}"
    elif marker_id is not None:
        opening_lark = f"<[{marker_id}]> {_text_or_nothing(trigger.lead)}"
    else:
        opening_lark = f"{text(opening)} {_text_or_nothing(trigger.lead)}"
    kind, source = trigger.grammar
    body = "body"
    rules = source.replace("start:", "body:", 1)
    if kind == "json_schema":
        body = json_value(json.loads(source))
        rules = ""
    # A closing marker may be a control token, which text can't spell. The reader does not need it
    # at the reply's end.
    return f"call_: {opening_lark} {body}\n{rules}"


def _text_or_nothing(lead: str) -> str:
    return text(lead) if lead else ""


def forced(style: ToolFormat, tools: Sequence[Tool], choice: Choice) -> tuple[str, Grammar]:
    """The beginning of a forced call, which is added to the prompt, and the constraint on the rest.

    With one possible function, everything up to its arguments is in the prompt, and the arguments'
    schema constrains the rest. With several, the model chooses the name within a schema of
    alternatives.
    """
    assert style.opening is not None
    key = style.arguments_key
    candidates = [parameters_of(t) for t in tools if choice.name in (None, parameters_of(t)[0])]
    if len(candidates) == 1:
        name, schema = candidates[0]
        prefix = f'{style.opening}{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": '
        return prefix, arguments(schema)
    return style.opening, one_call(candidates, key)
