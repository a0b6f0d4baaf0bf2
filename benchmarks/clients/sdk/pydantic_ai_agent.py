"""pydantic-ai, with OpenAI's chat."""

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from tools import FUNCTIONS, MODEL, TASK, URL

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=URL + "/v1", api_key="local"))
print(Agent(model, tools=list(FUNCTIONS.values())).run_sync(TASK).output)
