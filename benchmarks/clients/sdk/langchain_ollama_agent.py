"""langchain-ollama under LangGraph's agent."""

from langchain_ollama import ChatOllama
from langgraph.prebuilt import create_react_agent
from tools import FUNCTIONS, MODEL, TASK, URL

agent = create_react_agent(ChatOllama(base_url=URL, model=MODEL), list(FUNCTIONS.values()))
print(agent.invoke({"messages": [("user", TASK)]})["messages"][-1].content)
