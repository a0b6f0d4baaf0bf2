"""langchain-openai under LangGraph's agent."""

from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent
from tools import FUNCTIONS, MODEL, TASK, URL

model = ChatOpenAI(base_url=URL + "/v1", api_key="local", model=MODEL, max_retries=0)
agent = create_react_agent(model, list(FUNCTIONS.values()))
print(agent.invoke({"messages": [("user", TASK)]})["messages"][-1].content)
