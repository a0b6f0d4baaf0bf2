"""ollama: chat, streamed."""

import ollama
from tools import MODEL, MOST_TURNS, TASK, URL, call, chat_tools

client = ollama.Client(host=URL)
messages = [{"role": "user", "content": TASK}]
for _ in range(MOST_TURNS):
    text, thought, made = "", "", []
    for part in client.chat(model=MODEL, messages=messages, tools=chat_tools(), stream=True):
        text += part.message.content or ""
        thought += part.message.thinking or ""
        made += part.message.tool_calls or []
    messages.append({"role": "assistant", "content": text, "thinking": thought, "tool_calls": made})
    if not made:
        print(text)
        break
    for one in made:
        result = call(one.function.name, dict(one.function.arguments))
        messages.append({"role": "tool", "tool_name": one.function.name, "content": result})
