"""litellm's proxy in front of the server, and openai's loop through it."""

import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

KEY = "sk-local"
url, model = os.environ["LOCALLLM_URL"], os.environ["LOCALLLM_MODEL"]
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
config = f"""
model_list:
  - model_name: {model}
    litellm_params: {{model: openai/{model}, api_base: {url}/v1, api_key: local}}
general_settings: {{master_key: {KEY}}}
"""
with tempfile.TemporaryDirectory() as folder:
    (Path(folder) / "config.yaml").write_text(config)
    command = [sys.executable, "-m", "litellm.proxy.proxy_cli", "--config", "config.yaml"]
    proxy = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port)],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while proxy.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health/liveliness", timeout=1)
                break
            except OSError:
                time.sleep(0.2)
        os.environ |= {"LOCALLLM_URL": f"http://127.0.0.1:{port}", "LOCALLLM_KEY": KEY}
        runpy.run_path(str(Path(__file__).with_name("openai_chat.py")))
    finally:
        proxy.terminate()
        proxy.wait()
