"""openai: chat completions, streamed."""

import json

import openai
from tools import KEY, MODEL, MOST_TURNS, TASK, URL, call, chat_tools

client = openai.OpenAI(base_url=URL + "/v1", api_key=KEY, max_retries=0)
messages = [{"role": "user", "content": TASK}]
for _ in range(MOST_TURNS):
    with client.chat.completions.stream(
        model=MODEL, messages=messages, tools=chat_tools()
    ) as stream:
        for _event in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    if not message.tool_calls:
        print(message.content)
        break
    for made in message.tool_calls:
        result = call(made.function.name, json.loads(made.function.arguments))
        messages.append({"role": "tool", "tool_call_id": made.id, "content": result})
