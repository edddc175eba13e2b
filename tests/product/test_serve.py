"""``fullshard serve``: started, asked and stopped; its answers are those of ``generate``, under the same template."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest
from rank_pool import free_port
from tiny_models import make_model, make_tokenizer

from fullshard.errors import ConfigError
from fullshard.infer import generate
from fullshard.infer.generate import generate_text, load_for_inference, prompt_tokens

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ ' ' + m.content + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{% if place is defined %}{{ place + ' ' }}{% endif %}<assistant>{% endif %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """K1 whose template has a variable and whose merge says that the run set it to sun."""
    folder = make_tokenizer(make_model(tmp_path / "model", initializer_range=1.0), chat_template=TEMPLATE)
    (folder / "merge.json").write_text(json.dumps({"settings": {"template_arguments": {"place": "sun"}}}))
    return folder


def ask(port: int, model: Path, body: dict) -> dict:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps({"model": str(model), "temperature": 0, "max_tokens": 6, "seed": 1, **body}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def test_served_answers_are_those_of_generate(folder):
    """Default: the merged run's variables; a request may bring its own; Ctrl-C ends it and leaves nothing."""
    port, messages = free_port(), [{"role": "user", "content": "red blue"}]
    command = [sys.executable, "-m", "fullshard", "serve", str(folder), "--host", "127.0.0.1", "--port", str(port)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as server:
        try:
            assert f"http://127.0.0.1:{port}/v1 answers as model {folder}" in server.stdout.readline()
            for line in server.stderr:
                if "Uvicorn running" in line:
                    break
            else:
                pytest.fail("the server ended before it listened")
            wanted, prompts = [], []
            for place in ("sun", "moon"):
                answerer = load_for_inference(folder, {"place": place})
                prompts.append(prompt_tokens(answerer, messages))
                wanted += generate_text(answerer, [messages], 6)
            assert prompts[0] != prompts[1]
            bodies = [{"messages": messages}, {"messages": messages, "chat_template_kwargs": {"place": "moon"}}]
            found = [ask(port, folder, body) for body in bodies]
            assert [answer["choices"][0]["message"]["content"].strip() for answer in found] == [
                w.strip() for w in wanted
            ]
            assert wanted[0] != wanted[1]
        finally:
            children = psutil.Process(server.pid).children(recursive=True)
            server.send_signal(signal.SIGINT)
            server.communicate(timeout=30)
    assert not [child for child in children if child.is_running()]


def test_a_taken_port_is_named(folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} cannot be served at") as caught:
            generate.serve_model(folder, "127.0.0.1", port)
    assert f"--port {port + 1}" in caught.value.hint


def test_missing_packages_are_named(folder, monkeypatch):
    monkeypatch.setattr(generate, "NEEDED", ("fastapi", "no_such_package"))
    with pytest.raises(ConfigError, match="serve needs no_such_package, not installed") as caught:
        generate.serve_model(folder, "127.0.0.1", free_port())
    assert re.search(r'pip install "fullshard\[serve\]"', caught.value.hint)


@pytest.mark.parametrize(("room", "devices", "used"), [(100, 4, 1), (1.0, 4, 2), (0.4, 8, 4), (0.1, 3, 3)])
def test_vllm_is_taken_on_an_accelerator(folder, monkeypatch, room, devices, used):
    """What vLLM would be started with: --default-chat-template-kwargs is its own option (vllm-project/vllm 31343), and
    --tensor-parallel-size is as many devices as hold the weights in 80 % of their memory. ``room``: a device's, over
    the bytes of the weights."""
    import torch

    class Started(Exception):
        pass

    def execute(program: str, arguments: list[str]) -> None:
        raise Started(program, arguments)

    monkeypatch.setattr(generate, "select_device", lambda number: torch.device("meta"))
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    monkeypatch.setattr(generate, "device_memory", lambda: (int(room * size), 1 << 50))
    monkeypatch.setattr(generate, "num_devices", lambda: devices)
    monkeypatch.setattr(generate.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(generate.os, "execv", execute)
    with pytest.raises(Started) as caught:
        generate.serve_model(folder, "127.0.0.1", port := free_port())
    program, arguments = caught.value.args
    assert program == "/bin/vllm" and arguments[:3] == ["/bin/vllm", "serve", str(folder)]
    assert arguments[3:] == [
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--default-chat-template-kwargs",
        '{"place": "sun"}',
        "--tensor-parallel-size",
        str(used),
    ]
