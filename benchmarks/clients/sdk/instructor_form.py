"""instructor: no loop, but an answer in a given form through a forced call."""

import instructor
import openai
from pydantic import BaseModel
from tools import MODEL, TASK, URL


class Bird(BaseModel):
    """A bird."""

    name: str
    weight_mg: int


client = instructor.from_openai(openai.OpenAI(base_url=URL + "/v1", api_key="local"))
bird = client.chat.completions.create(
    model=MODEL, messages=[{"role": "user", "content": TASK}], response_model=Bird, max_retries=0
)
assert (bird.name, bird.weight_mg) == ("grey heron", 1_500_000), bird
print("All done: the file has another bird now.")
