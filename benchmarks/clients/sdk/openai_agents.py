"""openai-agents, with the responses API."""

from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from tools import FUNCTIONS, MODEL, TASK, URL

set_tracing_disabled(True)
model = OpenAIResponsesModel(MODEL, AsyncOpenAI(base_url=URL + "/v1", api_key="local"))
agent = Agent(name="worker", model=model, tools=[function_tool(f) for f in FUNCTIONS.values()])
print(Runner.run_sync(agent, TASK).final_output)
