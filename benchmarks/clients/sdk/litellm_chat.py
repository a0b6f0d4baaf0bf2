"""litellm: its provider for OpenAI-compatible servers, streamed and joined again."""

import json

import litellm
from tools import MODEL, MOST_TURNS, TASK, URL, call, chat_tools

messages = [{"role": "user", "content": TASK}]
where = {"model": f"openai/{MODEL}", "api_base": URL + "/v1", "api_key": "local"}
for _ in range(MOST_TURNS):
    chunks = list(litellm.completion(**where, messages=messages, tools=chat_tools(), stream=True))
    message = litellm.stream_chunk_builder(chunks, messages=messages).choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    if not message.tool_calls:
        print(message.content)
        break
    for made in message.tool_calls:
        result = call(made.function.name, json.loads(made.function.arguments))
        messages.append({"role": "tool", "tool_call_id": made.id, "content": result})
