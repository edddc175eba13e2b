"""An OpenAI-compatible server for a model folder: vLLM where it is installed, else transformers' own."""

import json
import os
import shutil
import socket
from importlib import util
from pathlib import Path
from typing import Any

from fullshard.device import select_device
from fullshard.errors import Blame, ConfigError, refusal
from fullshard.infer.generate import arguments_for
from fullshard.model.fetch import fetch_model

NEEDED = ("fastapi", "uvicorn", "openai")  # by transformers' server


def serve_model(
    model: str | Path, host: str = "localhost", port: int = 8000, template_arguments: dict[str, Any] | None = None
) -> None:
    """Answer HTTP requests until Ctrl-C, in fp32 on CPU, bf16 on an accelerator. A request's ``chat_template_kwargs``
    come before ``template_arguments``. ConfigError where the port is taken or a package is missing."""
    folder, device = fetch_model(model), select_device(0)
    with Blame(ConfigError, f"{host}:{port} cannot be served at", f"Take another port: --port {port + 1}"):
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    defaults = json.dumps(arguments_for(folder, template_arguments))
    if device.type != "cpu" and (vllm := shutil.which("vllm")):
        place = ["--host", host, "--port", str(port), "--default-chat-template-kwargs", defaults]
        os.execv(vllm, [vllm, "serve", str(folder), *place])
    if missing := [name for name in NEEDED if util.find_spec(name) is None]:
        raise refusal("not_served", missing=", ".join(missing), model=model)
    from transformers.cli.serve import Serve

    print(f"http://{host}:{port}/v1 answers as model {folder} (OpenAI's protocol); Ctrl-C ends it", flush=True)
    dtype = "float32" if device.type == "cpu" else "bfloat16"
    Serve(str(folder), host=host, port=port, device=str(device), dtype=dtype, chat_template_kwargs=defaults)
