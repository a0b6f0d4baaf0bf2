"""anthropic: messages, streamed."""

import anthropic
from tools import FUNCTIONS, MODEL, MOST_TURNS, SCHEMAS, TASK, URL, call

client = anthropic.Anthropic(base_url=URL, api_key="local", max_retries=0)
tools = [
    {"name": n, "description": FUNCTIONS[n].__doc__, "input_schema": s} for n, s in SCHEMAS.items()
]
messages = [{"role": "user", "content": TASK}]
for _ in range(MOST_TURNS):
    with client.messages.stream(
        model=MODEL, max_tokens=32_000, messages=messages, tools=tools
    ) as stream:
        answer = stream.get_final_message()
    messages.append({"role": "assistant", "content": answer.content})
    results = [
        {"type": "tool_result", "tool_use_id": b.id, "content": call(b.name, b.input)}
        for b in answer.content
        if b.type == "tool_use"
    ]
    if not results:
        print("".join(b.text for b in answer.content if b.type == "text"))
        break
    messages.append({"role": "user", "content": results})
