"""Puts the newest results of speed.py, trl.py and generate.py of benchmarks/ into performance.md and its translation.

python docs/performance_page.py
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
START, END = "<!-- figures: python docs/performance_page.py -->\n", "<!-- end of figures -->"
WORDS = {
    "performance.md": {
        "from": "From `benchmarks/results/{name}` ({cpu}, {cores} cores, load {load:.1f} before, {date}).",
        "share": "| 2 ranks x 1 thread | tokens/s | share of peak | peak a rank |",
        "scaling": "Windows of {window:,} tokens: 1 rank {one:.0f}, 2 ranks {two:.0f} tokens/s: {share:.0%} of twice one rank.",
        "profile": "| one rank's step, by cause |",
        "peer": "| {precision}, the same rows | tokens/s | peak a rank | largest gap of a loss to ours |",
        "times": "{times:.1f} times TRL (its best setting of those tried: {setting}), {raw:.1f} times the plain loop;"
        " {peak:.0%} of TRL's peak memory.",
        "loop": "plain fully_shard loop",
        "answers": "| answers, {tokens} new tokens each | tokens/s | share of the memory's limit |",
        "ours": "fullshard, one prompt",
        "best": "transformers, its best setting of {count}: {setting}",
        "same": "transformers, its best in fp32: {setting}",
        "single": "fullshard, 8 prompts one by one",
        "together": "fullshard, 8 prompts together",
        "limit": "One prompt: {over:.2f} times the best setting. 8 together: {together:.1f} times one by one, the same tokens."
        " The memory reads {reach:.0f} GB/s; the limit is that over the bytes of the weights, which every token reads.",
    },
    "performance.zh-CN.md": {
        "from": "来自 `benchmarks/results/{name}`（{cpu}，{cores} 核，之前的负载 {load:.1f}，{date}）。",
        "share": "| 2 个 rank × 1 线程 | token/秒 | 峰值占比 | 每 rank 峰值内存 |",
        "scaling": "窗口 {window:,} token：1 个 rank {one:.0f}，2 个 rank {two:.0f} token/秒，为单 rank 两倍的 {share:.0%}。",
        "profile": "| 单 rank 一步，按原因 |",
        "peer": "| {precision}，相同的行 | token/秒 | 每 rank 峰值内存 | 与我们的损失的最大差 |",
        "times": "是 TRL（试过的设置中最快的：{setting}）的 {times:.1f} 倍，手写循环的 {raw:.1f} 倍；内存峰值为 TRL 的 {peak:.0%}。",
        "loop": "手写的 fully_shard 循环",
        "answers": "| 回答，每个 {tokens} 个新 token | token/秒 | 内存上限占比 |",
        "ours": "fullshard，一个提示",
        "best": "transformers，试过的 {count} 种设置中最快的：{setting}",
        "same": "transformers，fp32 中最快的：{setting}",
        "single": "fullshard，8 个提示逐个",
        "together": "fullshard，8 个提示一起",
        "limit": "一个提示：是最快设置的 {over:.2f} 倍。8 个一起：是逐个的 {together:.1f} 倍，token 相同。"
        "内存每秒读 {reach:.0f} GB；上限 = 它 / 权重的字节数（每个 token 都要读一遍权重）。",
    },
}


def newest(topic: str) -> list[tuple[str, dict]]:
    """Name and content of the topic's newest result on each machine."""
    paths = sorted(RESULTS.glob(f"{topic}_*.json"), key=lambda path: path.stem.rpartition("_")[::-2])
    by_machine = {path.stem.rpartition("_")[0]: path for path in paths}
    return [(path.name, json.loads(path.read_text(encoding="utf-8"))) for path in by_machine.values()]


def head(words: dict[str, str], name: str, found: dict) -> str:
    """Where the figures are from."""
    machine = found["hardware"]
    facts = {"cpu": machine["cpu"], "cores": machine["cores"], "load": machine["load_before"], "date": found["date"]}
    return words["from"].format(name=name, **facts)


def speed_lines(words: dict[str, str], name: str, found: dict) -> list[str]:
    """Share of peak, scaling and profile."""
    lines = [head(words, name, found), "", words["share"], "|---|---|---|---|"]
    for precision in ("fp32", "bf16"):
        for method, values in found.get(precision, {}).items():
            if "failed" in values:
                continue
            speed, share = values["tokens_per_second"]["median"], values["share_of_peak"]["median"]
            peak = values["peak_bytes_a_rank"] / 1e9
            lines.append(f"| {method}, {precision} | {speed:.0f} | {share:.0%} | {peak:.2f} GB |")
    if scaling := found.get("scaling"):
        one, two = (statistics.median(scaling["tokens_per_second"][n]) for n in ("1", "2"))
        facts = {
            "window": scaling["window_tokens"],
            "one": one,
            "two": two,
            "share": scaling["share_of_twice_one_rank"],
        }
        lines += ["", words["scaling"].format(**facts)]
    if profile := found.get("profile_of_one_rank"):
        lines += ["", words["profile"] + "".join(f" {name} |" for name in profile), "|---" * (len(profile) + 1) + "|"]
        for cause in [cause for cause in next(iter(profile.values())) if cause != "seconds"]:
            lines.append(f"| {cause} |" + "".join(f" {shares[cause]:.1%} |" for shares in profile.values()))
    return lines


def trl_lines(words: dict[str, str], name: str, found: dict) -> list[str]:
    """The three beside each other."""
    lines = [head(words, name, found)]
    for precision in ("fp32", "bf16"):
        values = found.get(precision)
        if not isinstance(values, dict):
            continue
        lines += ["", words["peer"].format(precision=precision), "|---|---|---|---|"]
        for key, label in (("fullshard", "fullshard"), ("trl", "TRL"), ("raw", words["loop"])):
            speed, peak = values["tokens_per_second"][key]["median"], values["peak_bytes_a_rank"][key] / 1e9
            gap = values["largest_loss_gap"].get(key)
            lines.append(f"| {label} | {speed:.0f} | {peak:.2f} GB | {'-' if gap is None else f'{gap:.2%}'} |")
        facts = {"times": values["times_trl"], "raw": values["times_raw"], "peak": values["peak_of_trl"]}
        lines += ["", words["times"].format(setting=values["trl_setting"], **facts)]
    return lines


def answer_lines(words: dict[str, str], name: str, found: dict) -> list[str]:
    """One prompt beside transformers, and eight together beside one by one."""
    lines = [head(words, name, found), "", words["answers"].format(tokens=found["new_tokens"]), "|---|---|---|"]
    shares = {"ours": found["share_of_limit"]["ours"], "best": found["share_of_limit"]["best"]}
    rates = dict(zip(("ours", "best", "same", "together", "single"), found["tokens_per_second"].items(), strict=True))
    for key in ("ours", "best", "same", "single", "together"):
        told, rate = rates[key]
        label = words[key].format(count=len(found["settings_tried"]), setting=told.partition(": ")[2])
        lines.append(f"| {label} | {rate['median']:.1f} | {format(shares[key], '.0%') if key in shares else ''} |")
    facts = {"over": found["over_best"], "together": found["together_over_single"]}
    return [*lines, "", words["limit"].format(reach=found["bytes_per_second"] / 1e9, **facts)]


def main() -> None:
    """Write both pages."""
    for page, words in WORDS.items():
        parts = []
        for topic, make in (("speed", speed_lines), ("trl", trl_lines), ("generate", answer_lines)):
            parts += ["\n".join(make(words, *result)) for result in newest(topic)]
        if not parts:
            print("no results yet: python benchmarks/speed.py; python benchmarks/trl.py")
            return
        path = DOCS / page
        text = path.read_text(encoding="utf-8")
        before, _, rest = text.partition(START)
        after = rest.partition(END)[2]
        path.write_text(before + START + "\n\n".join(parts) + "\n" + END + after, encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
