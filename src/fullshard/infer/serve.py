"""An OpenAI-compatible server for a model folder: vLLM where it is installed, else transformers' own."""

import json
import os
import shutil
import socket
from importlib import util
from pathlib import Path
from typing import Any

from fullshard.device import select_device
from fullshard.errors import Blame, ConfigError
from fullshard.infer.generate import template_arguments_of
from fullshard.model.fetch import fetch_model

NEEDED = ("fastapi", "uvicorn", "openai")  # by transformers' server


def serve_model(
    model: str | Path, host: str = "localhost", port: int = 8000, template_arguments: dict[str, Any] | None = None
) -> None:
    """Answer HTTP requests (/v1/chat/completions and what else transformers or vLLM serves) until Ctrl-C. A request may
    override ``template_arguments``, by default those of the merged run, with its ``chat_template_kwargs``. fp32 on
    CPU, bf16 on an accelerator. Raises ConfigError where the port is taken or a package is missing."""
    folder, device = fetch_model(model), select_device(0)
    if template_arguments is None:
        template_arguments = template_arguments_of(folder)
    with Blame(ConfigError, f"{host}:{port} cannot be served at", f"Take another port: --port {port + 1}"):
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    defaults = json.dumps(template_arguments)
    if device.type != "cpu" and (vllm := shutil.which("vllm")):
        place = ["--host", host, "--port", str(port), "--default-chat-template-kwargs", defaults]
        os.execv(vllm, [vllm, "serve", str(folder), *place])
    if missing := [name for name in NEEDED if util.find_spec(name) is None]:
        hint = f'pip install "fullshard[serve]"  Without a server: fullshard chat {model}'
        raise ConfigError(f"serve needs {', '.join(missing)}, not installed here.", hint)
    from transformers.cli.serve import Serve

    print(f"http://{host}:{port}/v1 answers as model {folder} (OpenAI's protocol); Ctrl-C ends it", flush=True)
    dtype = "float32" if device.type == "cpu" else "bfloat16"
    Serve(str(folder), host=host, port=port, device=str(device), dtype=dtype, chat_template_kwargs=defaults)
