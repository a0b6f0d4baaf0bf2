"""smolagents: a tool of its own ends the loop."""

from smolagents import OpenAIServerModel, ToolCallingAgent, tool
from tools import FUNCTIONS, MODEL, TASK, URL

model = OpenAIServerModel(model_id=MODEL, api_base=URL + "/v1", api_key="local")
print(
    ToolCallingAgent(tools=[tool(f) for f in FUNCTIONS.values()], model=model, max_steps=8).run(
        TASK
    )
)
