"""A conversation in the terminal: answers appear word by word; works with a keyboard and with piped lines."""

import sys
from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import Any, TextIO
import torch
from rich.console import Console
from rich.markup import escape
from fullshard.errors import UserError
from fullshard.infer import generate
from fullshard.run_folder import MERGE_FACTS, read_json

HELP = "/reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer"


def start_chat(
    model: str | Path | generate.Answerer, system: str | None = None, max_new_tokens: int = 256,
    temperature: float = 0.0, template_arguments: dict[str, Any] | None = None, reader: TextIO | None = None,
    writer: TextIO | None = None, compare: str | Path | generate.Answerer | None = None,
) -> int:  # fmt: skip
    """Talk until /exit or the end of input; returns the number of answers. A model without chat template completes each
    line. ``compare``: a model (base: a merged folder's) with a talk of its own. UserError: no model, unfit settings."""
    reader, writer = reader or sys.stdin, writer or sys.stdout
    console = Console(file=writer, highlight=False, style="dim")
    if compare == "base":
        compare = read_json(Path(str(model)) / MERGE_FACTS, optional=True).get("base_model", compare)
    talks = []
    for each in (model, compare) if compare else (model,):
        answerer = generate.load_for_inference(each, template_arguments)
        if not answerer.has_template:
            generate.prompt_tokens(answerer, "", system)  # refuses a system message
        settings = generate.generation_settings(answerer, max_new_tokens, temperature, 1.0)
        talks.append((answerer.model.name_or_path if compare else "", answerer, settings, []))
    console.print(HELP if answerer.has_template else f"no chat template: every line is completed by itself; {HELP}")
    num_answers = 0
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        while (line := _read_line(reader, writer)) is not None and (text := line.strip()) not in ("/exit", "/quit"):
            if text == "/reset":
                for *_, messages in talks:
                    messages.clear()
                console.print("the conversation starts anew")
            elif text.startswith("/") and " " not in text:
                console.print(f"{escape(text)} is unknown; {HELP}")
            for name, answerer, settings, messages in talks if text and (" " in text or text[0] != "/") else ():
                console.print(f"{escape(name)}:") if name else None
                messages.append({"role": "user", "content": text})
                try:
                    answer = _answer(answerer, messages, system, settings, writer)
                except UserError as error:
                    messages.pop()
                    console.print(f"[not dim yellow]{escape(str(error))}[/]\n/reset makes room")
                    continue
                messages.append({"role": "assistant", "content": answer})
                num_answers += 1
    return num_answers


def _read_line(reader: TextIO, writer: TextIO) -> str | None:
    if reader is not sys.stdin or not reader.isatty():
        return reader.readline() or None
    with suppress(EOFError, KeyboardInterrupt):
        return input("> ")  # line editing through readline
    writer.write("\n")


def _answer(answerer: generate.Answerer, messages: list[Any], system: str | None, settings: Any, out: TextIO) -> str:
    """Stream one answer to ``out`` and return it; what was said until then where Ctrl-C stops it."""
    ids = generate.prompt_tokens(answerer, messages if answerer.has_template else messages[-1]["content"], system)
    settings = copy(settings)
    settings.max_new_tokens = most = min(settings.max_new_tokens, max(1, answerer.max_positions - len(ids)))
    generate.check_length(answerer, len(ids), most, "The conversation")
    streamer = generate.Stream(answerer.tokenizer, out)
    try:
        if len(generate.generate_batch(answerer, [ids], settings, streamer=streamer)[0]) == most:
            out.write(f" [cut after {most} tokens]")
    except KeyboardInterrupt:
        out.write(" [stopped]")
    print(file=out, flush=True)
    return streamer.text
