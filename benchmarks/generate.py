"""Tokens a second of answers: ours beside plain transformers, 8 prompts together beside one by one.

    python benchmarks/generate.py [--tokens 128] [--repeats 3]

The built-in SmolLM2-135M-Instruct, greedy, every answer exactly ``--tokens`` new tokens (no stop id), the prompt's
pass included. First each setting of transformers' ``generate`` once: bf16 and fp32, sdpa and eager, dynamic and static
cache, one thread and all; then the best once more with a static cache under torch.compile. Then, in turns: ours and
the best setting, one prompt; ours with 8 prompts of several lengths, together and one by one. The limit is what the
memory allows: its bandwidth (1 GB summed by all threads, best of 10) over the bytes of the weights that every token
reads (a tied head once; the lookup in the embedding is not counted). About 4 minutes on 2 quiet cores. Written to
benchmarks/results/generate_HARDWARE_DATE.json.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from measuring import MODEL, hardware, spread, write
from transformers import AutoModelForCausalLM, CompileConfig, GenerationConfig
from transformers.utils.logging import disable_progress_bar

from fullshard.infer.generate import Answerer, PackedLinear, generate_ids, load_for_inference, prompt_tokens

SYSTEM = "You are a helpful assistant who answers in whole sentences."
PROMPTS = (
    "Tell me about the history of the printing press and what it changed.",
    "Why is the sky blue?",
    "Explain how a bicycle stays upright while it is moving, and what happens to it when it becomes slower and slower.",
    "Write a story about a lighthouse.",
    "What should a person who has never cooked before learn first, and which three dishes would you teach them?",
    "List the planets.",
    "Describe a morning at a market in a small town: the people, the goods, the sounds and the smells, one by one.",
    "How do vaccines work?",
)
ALL = os.cpu_count() or 1
TRIED = 48  # new tokens where settings are only compared
Setting = dict[str, Any]


def bandwidth() -> float:
    """Bytes a second that all threads read together."""
    torch.set_num_threads(ALL)
    numbers, best = torch.ones(2**28), float("inf")
    for _ in range(10):
        started = time.perf_counter()
        numbers.sum()
        best = min(best, time.perf_counter() - started)
    return numbers.nbytes / best


def bytes_read(model: torch.nn.Module) -> int:
    """Bytes of the weights that every token reads: all but an embedding's table, which counts where it is the head."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    read = {id(weight): weight.nbytes for weight in model.parameters()}
    if not isinstance(head, PackedLinear) and head.weight is table.weight:
        return sum(read.values())
    packed = sum(2 * module.weight.numel() for module in model.modules() if isinstance(module, PackedLinear))
    return sum(read.values()) - table.weight.nbytes + packed


def plain(model: Any, ids: list[int], tokens: int, setting: Setting) -> list[int]:
    """The new ids by transformers' ``generate``."""
    torch.set_num_threads(setting["threads"])
    if model.config._attn_implementation != setting["attention"]:
        model.set_attn_implementation(setting["attention"])
    config = GenerationConfig(min_new_tokens=tokens, max_new_tokens=tokens, eos_token_id=2, pad_token_id=2)
    if setting["cache"] == "static":
        config.cache_implementation = "static"
    config.disable_compile = not setting["compile"]
    if setting["compile"]:
        config.compile_config = CompileConfig(fullgraph=False, mode="default", dynamic=None)
        config.compile_config._compile_all_devices = True  # else ``generate`` compiles on accelerators only
    inputs = torch.tensor([ids])
    output = model.generate(inputs, attention_mask=torch.ones_like(inputs), generation_config=config)
    return output[0, len(ids) :].tolist()


def rate(answer: Callable[[], Any], tokens: int) -> tuple[float, Any]:
    """Tokens a second of one call, and what it returns."""
    started = time.perf_counter()
    said = answer()
    return tokens / (time.perf_counter() - started), said


def try_settings(models: dict[str, Any], ids: list[int], tokens: int) -> list[Setting]:
    """Every setting with its tokens a second, best first."""
    choices = ("bf16", "fp32"), ("sdpa", "eager"), ("dynamic", "static"), sorted({1, ALL})
    tried: list[Setting] = []

    def measure(setting: Setting, tokens: int) -> None:
        model = models[setting["precision"]]
        started = time.perf_counter()
        plain(model, ids, tokens if setting["compile"] else 4, setting)
        setting["first_call_seconds"] = time.perf_counter() - started
        setting["tokens_per_second"] = rate(lambda: plain(model, ids, tokens, setting), tokens)[0]
        print(f"{name_of(setting):40} {setting['tokens_per_second']:6.1f} tokens/s", flush=True)
        tried.append(setting)

    for values in itertools.product(*choices):
        names = ("precision", "attention", "cache", "threads")
        measure({**dict(zip(names, values, strict=True)), "compile": False}, TRIED)
    best = lambda setting: -setting["tokens_per_second"]  # noqa: E731
    measure({**min(tried, key=best), "cache": "static", "compile": True}, tokens)
    return sorted(tried, key=best)


def name_of(setting: Setting) -> str:
    """bf16, sdpa, static cache, 2 threads, compiled."""
    words = [setting["precision"], setting["attention"], f"{setting['cache']} cache", f"{setting['threads']} threads"]
    return ", ".join([*words, "compiled"] if setting["compile"] else words)


def compare(answerer: Answerer, models: dict[str, Any], tokens: int, repeats: int) -> dict[str, Any]:
    """All figures of one run."""
    prompts = [prompt_tokens(answerer, text, SYSTEM if number % 3 else None) for number, text in enumerate(PROMPTS)]
    reach = bandwidth()
    tried = try_settings(models, prompts[0], tokens)
    best, same = tried[0], next(each for each in tried if each["precision"] == "fp32" and not each["compile"])
    ours = lambda some: generate_ids(answerer, some, tokens)  # noqa: E731
    theirs = lambda setting: plain(models[setting["precision"]], prompts[0], tokens, setting)  # noqa: E731
    ways = {
        "ours, one prompt": (tokens, lambda: ours(prompts[:1])),
        f"transformers, best: {name_of(best)}": (tokens, lambda: theirs(best)),
        f"transformers, fp32: {name_of(same)}": (tokens, lambda: theirs(same)),
        "ours, 8 together": (tokens * len(prompts), lambda: ours(prompts)),
        "ours, 8 one by one": (tokens * len(prompts), lambda: [ours([prompt])[0] for prompt in prompts]),
    }  # fmt: skip
    ours(prompts[:1])
    rates: dict[str, list[float]] = {name: [] for name in ways}
    said: dict[str, Any] = {}
    for _ in range(repeats):
        for name, (count, way) in ways.items():
            torch.set_num_threads(ALL)
            one, said[name] = rate(way, count)
            rates[name].append(one)
            print(f"{name:80} {one:6.1f} tokens/s", flush=True)
    answers = list(said.values())
    if answers[3] != answers[4]:
        raise ValueError("8 together do not answer as one by one")
    median = [statistics.median(each) for each in rates.values()]
    limits = {"ours": reach / bytes_read(answerer.model)}
    limits |= {precision: reach / bytes_read(model) for precision, model in models.items()}
    return {
        "bytes_per_second": reach,
        "limit_tokens_per_second": limits,
        "tokens_per_second": {name: spread(each) for name, each in rates.items()},
        "over_best": median[0] / median[1],
        "over_fp32": median[0] / median[2],
        "together_over_single": median[3] / median[4],
        "share_of_limit": {"ours": median[0] / limits["ours"], "best": median[1] / limits[best["precision"]]},
        "same_tokens_as_fp32": sum(a == b for a, b in zip(answers[0][0], answers[2], strict=True)) / tokens,
        "prompt_tokens": [len(prompt) for prompt in prompts],
        "new_tokens": tokens,
        "settings_tried": tried,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    machine = hardware()
    disable_progress_bar()
    answerer = replace(load_for_inference(MODEL), stop_ids=())
    models = {}
    for precision, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        models[precision] = AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype, attn_implementation="sdpa").eval()
        models[precision].generation_config = GenerationConfig()
    found = compare(answerer, models, options.tokens, options.repeats)
    ours, best = (found["share_of_limit"][key] for key in ("ours", "best"))
    print(f"one prompt: {found['over_best']:.2f} times transformers' best, {found['over_fp32']:.2f} times its fp32")
    print(f"8 together: {found['together_over_single']:.2f} times one by one; the same answers")
    reach = found["bytes_per_second"] / 1e9
    print(f"memory reads {reach:.1f} GB/s; share of its limit: ours {ours:.0%}, theirs {best:.0%}")
    command = f"python benchmarks/generate.py --tokens {options.tokens} --repeats {options.repeats}"
    print(write("generate", command, {"hardware": machine, "model": MODEL.name, **found}, ("torch", "transformers")))


if __name__ == "__main__":
    main()
