"""openai: responses, streamed, where each turn continues the previous one."""

import json

import openai
from tools import FUNCTIONS, MODEL, MOST_TURNS, SCHEMAS, TASK, URL, call

client = openai.OpenAI(base_url=URL + "/v1", api_key="local", max_retries=0)
tools = [
    {
        "type": "function",
        "name": n,
        "description": FUNCTIONS[n].__doc__,
        "parameters": s,
        "strict": False,
    }
    for n, s in SCHEMAS.items()
]
asked, before = [{"role": "user", "content": TASK}], None
for _ in range(MOST_TURNS):
    ask = {"previous_response_id": before} if before else {}
    with client.responses.stream(model=MODEL, input=asked, tools=tools, **ask) as stream:
        for _event in stream:
            pass
        answer = stream.get_final_response()
    before, asked = answer.id, []
    for made in answer.output:
        if made.type == "function_call":
            result = call(made.name, json.loads(made.arguments))
            asked.append(
                {"type": "function_call_output", "call_id": made.call_id, "output": result}
            )
    if not asked:
        print(answer.output_text)
        break
