"""Answers from a model folder, or a server: greedy or sampled, in batches whose answers are those of single calls.
Prompts are padded on the left, pads masked by place: pad may equal stop. Shapes: B prompts, S tokens of the longest."""

import json
import math
import os
import shutil
import socket
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from importlib import util
from itertools import takewhile
from pathlib import Path
from typing import Any, TextIO
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, TextStreamer
from transformers.utils.logging import disable_progress_bar
from fullshard.data.chat import Message, Renderer, Tools, Variables, choose_pad_id, load_tokenizer
from fullshard.device import device_memory, num_devices, select_device
from fullshard.errors import Blame, ConfigError, DataError, ModelError, refusal
from fullshard.frozen import Frozen
from fullshard.model.blocks import PEFT_CONFIG
from fullshard.model.fetch import fetch_model
from fullshard.model.load import attention_for, read_config, stop_ids, union_of_ids
from fullshard.run_folder import MERGE_FACTS, hold, read_json

Prompt = str | list[Message]  # a user message (plain text where the model has no chat template), or messages
Ids = list[int]  # of tokens
NEEDED, SERVED = ("fastapi", "uvicorn", "openai"), 0.8  # by transformers' server; weights' share of a device's memory


class Answerer(Frozen):
    """A model loaded for inference, with its tokenizer and where it stops."""

    model: Any
    tokenizer: Any
    stop_ids: tuple[int, ...]  # ids that end an answer
    max_positions: float  # most tokens of prompt and answer together; infinite where the model has no limit
    pad_id: int  # one that the model's table has; which one does not matter, since pads are masked by place
    renderer: Renderer  # makes the ids of prompts, as training does
    has_template = property(lambda self: bool(self.tokenizer.chat_template))  # prompts go through a chat template


class Stream(TextStreamer):
    """Prints an answer to ``writer`` as it is made, and keeps its text."""

    def __init__(self, tokenizer: Any, writer: TextIO) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.text, self._writer = "", writer

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Called by ``generate`` with each finished piece of text."""
        self.text += text
        print(text, end="", file=self._writer, flush=True)


class PackedLinear(nn.Module):
    """An ``nn.Linear`` for answers on a CPU: fp32 products with its weight in fp16, whose bytes set the pace. FBGEMM
    (torch's, on x86) reads at the memory's rate; a row's result does not depend on others (docs/performance.md)."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self._packed, self.bias = torch.ops.quantized.linear_prepack_fp16(linear.weight, linear.bias), linear.bias

    weight = property(lambda self: torch.ops.quantized.linear_unpack_fp16(self._packed)[0])  # a copy in fp32

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """``inputs`` (..., features in) to (..., features out), both fp32."""
        return torch.ops.quantized.linear_dynamic_fp16(inputs, self._packed)


@torch.no_grad()
def pack_linears(model: nn.Module) -> None:
    """Replace an fp32 model's linear layers whose weights fp16 holds: those once stored in bf16 or fp16. Only what lies
    under fp16's normal range moves, by at most 2**-25: less than the rounding of an fp32 sum."""
    for name in [name for name, module in model.named_modules() if type(module) is nn.Linear]:
        weight = (linear := model.get_submodule(name)).weight
        if (weight.half().float() - weight).abs().max() <= 2**-25:
            model.set_submodule(name, PackedLinear(linear))


def load_for_inference(model: str | Path | Answerer, template_arguments: Variables = None) -> Answerer:
    """Load a model (folder or id), or a PEFT adapter on its base, once: fp32 on CPU, bf16 on an accelerator, over all
    of them where there are several. ``template_arguments``: the chat template's; None: the merged run's. ModelError."""
    if isinstance(model, Answerer):
        other = template_arguments is not None
        return replace(model, renderer=Renderer(model.tokenizer, "all", template_arguments)) if other else model
    adapter = Path(model) if (Path(model) / PEFT_CONFIG).is_file() else None
    with hold(adapter) if adapter else nullcontext():  # it may be a checkpoint of a run that trains
        folder = fetch_model(read_json(adapter / PEFT_CONFIG)["base_model_name_or_path"] if adapter else model)
        device = select_device(0)
        disable_progress_bar()  # transformers' own bar over loading; ours are the only ones
        settings = {"attn_implementation": attention_for(read_config(folder)), "output_loading_info": True}
        settings["dtype"] = torch.float32 if device.type == "cpu" else torch.bfloat16
        with Blame(ModelError, f"{folder} cannot be loaded", "Check the folder, or download it again."):
            spread = {"device_map": "auto"} if num_devices() > 1 else {}
            loaded, info = AutoModelForCausalLM.from_pretrained(folder, **settings, **spread)
        if absent := sorted(info["missing_keys"]) + sorted(map(str, info["mismatched_keys"])):  # it only warns
            raise refusal("lacking_weights", folder=folder, name=absent[0], count=len(absent))
        if adapter:
            from peft import PeftModel, get_peft_model_state_dict
            from peft.utils import load_peft_weights

            with Blame(ModelError, f"{adapter} does not fit {folder}", f"fullshard merge {adapter} --base MODEL"):
                loaded = PeftModel.from_pretrained(loaded, str(adapter), autocast_adapter_dtype=False)
                stored = load_peft_weights(str(adapter), device="cpu")
                if strange := stored.keys() ^ get_peft_model_state_dict(loaded).keys():  # PEFT only warns
                    raise ValueError(f"{min(strange)} is only in one of them ({len(strange)} such tensors)")
    if device.type == "cpu" and torch.backends.quantized.engine in ("x86", "fbgemm"):
        pack_linears(loaded)
    tokenizer = load_tokenizer(adapter if adapter and any(adapter.glob("tokenizer*")) else folder)
    loaded.generation_config = GenerationConfig()  # generate() fills unset values from it: a clean one stays greedy
    limit = getattr(loaded.config.get_text_config(), "max_position_embeddings", None) or math.inf
    ids = tuple(stop_ids(folder) or union_of_ids(tokenizer.eos_token_id))
    pad_id = min(choose_pad_id(tokenizer), loaded.get_input_embeddings().weight.shape[0] - 1)
    renderer = Renderer(tokenizer, "all", arguments_for(folder, template_arguments))
    return Answerer(loaded.eval() if spread else loaded.eval().to(device), tokenizer, ids, limit, pad_id, renderer)


def arguments_for(folder: Path, given: Variables) -> dict[str, Any]:
    """Variables of the chat template: those ``given``, else as the run set them that ``folder`` was merged from."""
    made = read_json(folder / MERGE_FACTS, optional=True)
    return (made.get("settings", {}).get("template_arguments") or {}) if given is None else given


def generate_text(
    model: str | Path | Answerer, prompts: Sequence[Prompt], max_new_tokens: int = 64, system: str | None = None,
    template_arguments: Variables = None, stream: TextIO | None = None, **options: Any,
) -> list[str]:  # fmt: skip
    """The answers to ``prompts``, in order, without special tokens. ``system``: where a prompt has none. ``stream``:
    gets a single answer as it is made. ``options``: of ``generate_ids``. ConfigError: unfit settings, or too long."""
    answerer = load_for_inference(model, template_arguments)
    prompt_ids = [prompt_tokens(answerer, prompt, system) for prompt in prompts]
    if stream and len(prompts) == 1:
        options["streamer"] = Stream(answerer.tokenizer, stream)
    answers = generate_ids(answerer, prompt_ids, max_new_tokens, **options)
    return [answerer.tokenizer.decode(ids, skip_special_tokens=True) for ids in answers]


def prompt_tokens(answerer: Answerer, prompt: Prompt, system: str | None = None, tools: Tools = None) -> Ids:
    """The token ids of one prompt, up to where the answer begins."""
    if answerer.has_template:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if system is not None and all(message["role"] != "system" for message in messages):
            messages.insert(0, {"role": "system", "content": system})
        return answerer.renderer.prompt(messages, tools)
    if system is not None or not isinstance(prompt, str):
        raise refusal("plain_text_only")
    return answerer.renderer.prompt(prompt)


def generate_ids(
    answerer: Answerer, prompt_ids: Sequence[Ids], max_new_tokens: int = 64, temperature: float = 0.0, seed: int = 0,
    batch_size: int = 16, top_p: float = 1.0, progress: Callable[[int, int], None] | None = None, **options: Any,
) -> list[Ids]:  # fmt: skip
    """Like ``generate_text`` on token ids: each answer's new ids, up to a stop id. ``temperature`` 0: greedy; else the
    ``top_p`` share is sampled, repeatably by ``seed``. ``progress``: (done, all). ``options``: ``generate_batch``'s."""
    settings = generation_settings(answerer, max_new_tokens, temperature, top_p)
    if batch_size < 1:
        raise ConfigError(f"batch_size must be at least 1; it is {batch_size}.", "Leave it out for 16.")
    for number, ids in enumerate(prompt_ids, 1):
        check_length(answerer, len(ids), max_new_tokens, f"Prompt {number}")
    by_length = sorted(range(len(prompt_ids)), key=lambda index: len(prompt_ids[index]))
    answers, device = {}, answerer.model.device
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
        torch.manual_seed(seed)
        for start in range(0, len(by_length), batch_size):
            chosen = by_length[start : start + batch_size]
            batch = [prompt_ids[index] for index in chosen]
            answers |= zip(chosen, generate_batch(answerer, batch, settings, **options), strict=True)
            if progress:
                progress(len(answers), len(by_length))
    return [answers[index] for index in range(len(prompt_ids))]


def answer_file(model: str | Path | Answerer, data: str | Path, **options: Any) -> list[dict[str, Any]]:
    """JSONL rows, each with the ``answer`` to its prompt or messages; takes generate_text's. DataError: has neither."""
    rows = []
    for number, line in enumerate(Path(data).read_text(encoding="utf-8-sig").split("\n"), 1):
        if line.strip():
            hint = 'A line each: {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}'
            with Blame(DataError, f"{data}:{number} has neither prompt nor messages", hint):
                rows.append(json.loads(line))
                rows[-1]["messages" if "messages" in rows[-1] else "prompt"][0]
    answers = generate_text(model, [row.get("messages") or row["prompt"] for row in rows], **options)
    return [row | {"answer": answer} for row, answer in zip(rows, answers, strict=True)]


def check_length(answerer: Answerer, num_prompt_tokens: int, max_new_tokens: int, name: str) -> None:
    """Raise ConfigError where a prompt is empty or, with its answer, exceeds the model's positions."""
    if num_prompt_tokens == 0:
        raise refusal("empty_prompt", name=name)
    if max_new_tokens > (room := answerer.max_positions - num_prompt_tokens):
        tokens, whole, limit = num_prompt_tokens, num_prompt_tokens + max_new_tokens, answerer.max_positions
        less = f"Ask for at most {room} new tokens, or shorten the prompt." if room > 0 else "Shorten the prompt."
        raise refusal("no_positions", name=name, tokens=tokens, new=max_new_tokens, whole=whole, limit=limit, less=less)


def generation_settings(answerer: Answerer, max_new_tokens: int, temperature: float, top_p: float) -> GenerationConfig:
    """What steers ``generate``, and nothing else does. ConfigError for settings that do not fit."""
    if max_new_tokens < 1 or not 0 <= temperature <= 100 or not 0 < top_p <= 1:
        raise refusal("unfit_settings", new=max_new_tokens, temperature=temperature, top_p=top_p)
    if top_p != 1 and temperature == 0:
        raise refusal("idle_top_p", top_p=top_p)
    sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0} if temperature > 0 else {}
    ids = {"eos_token_id": list(answerer.stop_ids) or None, "pad_token_id": answerer.pad_id}
    return GenerationConfig(max_new_tokens=max_new_tokens, **ids, **sampling)


@torch.inference_mode()
def generate_batch(answerer: Answerer, batch: list[Ids], settings: GenerationConfig, **options: Any) -> list[Ids]:
    """The new ids of each answer, cut before its stop id. ``options``: of transformers' ``generate``."""
    longest, device = max(map(len, batch)), answerer.model.device
    rows = [[answerer.pad_id] * (longest - len(ids)) + list(ids) for ids in batch]
    masks = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in batch]
    inputs_BS, mask_BS = torch.tensor(rows, device=device), torch.tensor(masks, device=device)
    output = answerer.model.generate(input_ids=inputs_BS, attention_mask=mask_BS, generation_config=settings, **options)
    return [list(takewhile(lambda n: n not in answerer.stop_ids, ids)) for ids in output[:, longest:].tolist()]


def serve_model(
    model: str | Path, host: str = "localhost", port: int = 8000, template_arguments: Variables = None
) -> None:
    """Answer OpenAI's HTTP protocol until Ctrl-C, by vLLM if an accelerator has it or transformers; fp32 on CPU, else
    bf16. A request's ``chat_template_kwargs`` precede ``template_arguments``. ConfigError: port taken, no package."""
    folder, device = fetch_model(model), select_device(0)
    with Blame(ConfigError, f"{host}:{port} cannot be served at", f"Take another port: --port {port + 1}"):
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    defaults = json.dumps(arguments_for(folder, template_arguments))
    if device.type != "cpu" and (vllm := shutil.which("vllm")):
        options = ["--host", host, "--port", str(port), "--default-chat-template-kwargs", defaults]
        size, most = sum(path.stat().st_size for path in folder.glob("*.safetensors")), num_devices()
        count = next((n for n in (1, 2, 4, 8) if n < most and size < SERVED * n * min(device_memory())), most)
        os.execv(vllm, [vllm, "serve", str(folder), *options, "--tensor-parallel-size", str(count)])
    if missing := [name for name in NEEDED if util.find_spec(name) is None]:
        raise refusal("not_served", missing=", ".join(missing), model=model)
    from transformers.cli.serve import Serve

    print(f"http://{host}:{port}/v1 answers as model {folder} (OpenAI's protocol); Ctrl-C ends it", flush=True)
    dtype, place = "float32" if device.type == "cpu" else "bfloat16", "auto" if num_devices() > 1 else str(device)
    Serve(str(folder), host=host, port=port, device=place, dtype=dtype, chat_template_kwargs=defaults)
