"""The figures of docs/memory.md as SVG, drawn from memory_numbers.py with nothing but strings."""

from __future__ import annotations

from html import escape

from memory_numbers import (
    DEVICES,
    ROW_TOKENS,
    STAGES,
    Moment,
    Numbers,
    stage_bytes,
    unfused_bytes,
    working_bytes,
)

WIDTH = 760
GREY, INK = "#d9d9d9", "#222222"
# Okabe and Ito's colours, told apart by colour-blind readers too.
BLUE, SKY, GREEN, ORANGE, RED, PINK, YELLOW = (
    "#0072b2", "#56b4e9", "#009e73", "#e69f00", "#d55e00", "#cc79a7", "#f0e442",
)  # fmt: skip
PARTS = {"copy": BLUE, "weights": SKY, "gradients": ORANGE, "momentum": GREEN, "variance": "#66c2a5"}
LIVE = {
    "context": "#999999",
    "masters": BLUE,
    "moments": GREEN,
    "gradients": ORANGE,
    "gathered": SKY,
    "inputs": PINK,
    "recomputed": RED,
    "reduction": YELLOW,
    "logits": "#000000",
}
KINDS = {"tensors": BLUE, "mlp": SKY, "norms": GREEN, "statistics": ORANGE, "scores": RED}

ENGLISH = {
    "states_title": "Model states on one of {ranks} ranks, {model}",
    "card": "one {card}: {size} GB",
    "copy": "FP32 copy",
    "weights": "16-bit weights",
    "gradients": "gradients",
    "momentum": "Adam, first moment",
    "variance": "Adam, second moment",
    "ours": "fullshard",
    "step_title": "One step of {model} on one of {ranks} ranks, unit by unit (order, not duration)",
    "peak": "highest: {size} GB",
    "phases": {"forward": "forward", "backward": "backward", "step": "step"},
    "context": "device context",
    "masters": "FP32 shard",
    "moments": "Adam's moments",
    "gathered": "gathered weights",
    "inputs": "block inputs",
    "recomputed": "recomputed block",
    "reduction": "reduction buffer",
    "logits": "logits chunk",
    "block_title": "Kept for backward by one block, one row of {row} tokens, {model}",
    "infinity": "formula of ZeRO-Infinity",
    "unfused": "formula of Korthikanti",
    "eager": "measured, eager",
    "sdpa": "measured, SDPA",
    "linear": "grows with the tokens",
    "scores": "rows x rows",
    "tensors": "16-bit inputs",
    "mlp": "MLP",
    "norms": "FP32 of the norms",
    "statistics": "statistics",
}
CHINESE = {
    "states_title": "{ranks} 个 rank 之一上的模型状态，{model}",
    "card": "一张 {card}：{size} GB",
    "copy": "FP32 副本",
    "weights": "16 位权重",
    "gradients": "梯度",
    "momentum": "Adam 一阶矩",
    "variance": "Adam 二阶矩",
    "ours": "fullshard",
    "step_title": "{model} 的一步，{ranks} 个 rank 之一，逐单元（只表示顺序，不表示时长）",
    "peak": "最高：{size} GB",
    "phases": {"forward": "前向", "backward": "反向", "step": "更新"},
    "context": "设备上下文",
    "masters": "FP32 分片",
    "moments": "Adam 的两个矩",
    "gathered": "聚集的权重",
    "inputs": "各层输入",
    "recomputed": "重算的一层",
    "reduction": "规约缓冲区",
    "logits": "logits 分块",
    "block_title": "一层为反向保存的显存，一行 {row} 个词元，{model}",
    "infinity": "ZeRO-Infinity 的公式",
    "unfused": "Korthikanti 的公式",
    "eager": "实测，eager",
    "sdpa": "实测，SDPA",
    "linear": "随词元数线性增长",
    "scores": "行 x 行",
    "tensors": "16 位输入",
    "mlp": "MLP",
    "norms": "归一化的 FP32",
    "statistics": "统计量",
}


def gigabytes(count: float) -> str:
    """``16.4``: decimal gigabytes, one place."""
    return f"{count / 1e9:.1f}"


def rectangle(x: float, y: float, width: float, height: float, colour: str) -> str:
    """A filled box."""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'


def label(x: float, y: float, text: str, anchor: str = "start", size: int = 13) -> str:
    """Text with its baseline at ``y``."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, colour: str = INK, dashes: str = "") -> str:
    """A thin line."""
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{dashed}/>'


def picture(height: int, title: str, parts: list[str]) -> str:
    """A whole SVG on white, so that it can be read on a dark page too."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        f' font-family="sans-serif" fill="{INK}" role="img">'
    )
    background = rectangle(0, 0, WIDTH, height, "#ffffff")
    return "\n".join(
        [head, f"<title>{escape(title)}</title>", background, label(16, 24, title, size=15), *parts, "</svg>", ""]
    )


def legend(y: float, colours: dict[str, str], words: dict) -> list[str]:
    """Colour keys, four a line."""
    found = []
    for index, (name, colour) in enumerate(colours.items()):
        x, line_y = 16 + 186 * (index % 4), y + 20 * (index // 4)
        found += [rectangle(x, line_y - 10, 12, 12, colour), label(x + 18, line_y, words[name], size=12)]
    return found


def bars(rows: list[tuple[str, dict[str, float]]], colours: dict[str, str], longest: float, top: float) -> list[str]:
    """Horizontal stacked bars with their name before and their sum behind; bytes, ``longest`` fills the width."""
    found = []
    for index, (name, parts) in enumerate(rows):
        x, y = 190.0, top + 34 * index
        found.append(label(x - 10, y + 17, name, "end"))
        for part, size in parts.items():
            width = size / longest * (WIDTH - 260)
            found.append(rectangle(x, y, width, 24, colours[part]))
            x += width
        found.append(label(x + 6, y + 17, f"{gigabytes(sum(parts.values()))} GB"))
    return found


def states_figure(numbers: Numbers, words: dict) -> str:
    """Bytes of model states on one rank under each stage, and ours at rest with its gradients."""
    size, ranks = numbers.shape.parameters, numbers.plan.ranks
    rows = [(stage, stage_bytes(stage, size, ranks)) for stage in STAGES]
    causes = {line.cause: line.bytes for line in numbers.plan.lines}
    half = causes["optimizer state"] / 2
    ours = {"copy": causes["fp32 masters"], "gradients": causes["fp32 gradients"], "momentum": half, "variance": half}
    rows.append((words["ours"], ours))
    longest = sum(rows[0][1].values())
    x = 190 + numbers.card_bytes / longest * (WIDTH - 260)
    card = words["card"].format(card=DEVICES.split("x", 1)[1].upper(), size=gigabytes(numbers.card_bytes))
    mark = [line(x, 58, x, 236, RED, "5 4"), label(x, 52, card, "middle", 12)]
    title = words["states_title"].format(ranks=ranks, model="Qwen3-8B")
    return picture(296, title, [*bars(rows, PARTS, longest, 66), *mark, *legend(262, PARTS, words)])


def block_figure(numbers: Numbers, words: dict) -> str:
    """What one block keeps of one row: two formulas of the literature, eager attention, SDPA."""
    shape, row = numbers.shape, ROW_TOKENS
    infinity = working_bytes(row, row, shape.hidden_size, shape.num_heads, 1)
    unfused = unfused_bytes(row, row, shape.hidden_size, shape.num_heads)
    linear = {"infinity": 16 * row * shape.hidden_size, "unfused": 34 * row * shape.hidden_size}
    colours = KINDS | {"linear": "#999999"}
    rows = [
        (words["infinity"], {"linear": linear["infinity"], "scores": infinity - linear["infinity"]}),
        (words["unfused"], {"linear": linear["unfused"], "scores": unfused - linear["unfused"]}),
        (words["eager"], {kind: numbers.eager.get(kind, 0) for kind in KINDS}),
        (words["sdpa"], {kind: numbers.sdpa.get(kind, 0) for kind in KINDS}),
    ]
    longest = max(sum(parts.values()) for _, parts in rows)
    title = words["block_title"].format(row=f"{row:,}", model="Qwen3-8B")
    return picture(240, title, [*bars(rows, colours, longest, 46), *legend(206, colours, words)])


def step_figure(numbers: Numbers, words: dict) -> str:
    """Live bytes of one rank through a step, stacked by cause."""
    moments = numbers.moments
    top, bottom, left, right = 56.0, 316.0, 56.0, WIDTH - 16.0
    tallest = 5e9 * -(-max(moment.total for moment in moments) // 5e9)
    slot = (right - left) / len(moments)

    def height(size: float) -> float:
        return size / tallest * (bottom - top)

    parts = []
    for step in range(0, int(tallest / 1e9) + 1, 5):
        y = bottom - height(step * 1e9)
        parts += [line(left, y, right, y, GREY), label(left - 6, y + 4, f"{step} GB", "end", 11)]
    heights = [0.0] * len(moments)
    for cause, colour in LIVE.items():
        above = [low + height(moment.live.get(cause, 0)) for low, moment in zip(heights, moments, strict=True)]
        parts.append(_step_area(left, slot, bottom, heights, above, colour))
        heights = above
    parts += _phase_marks(moments, words, left, slot, top, bottom)
    highest = max(range(len(moments)), key=lambda index: moments[index].total)
    x, y = left + slot * (highest + 0.5), bottom - height(moments[highest].total)
    parts += [label(x + 8, y - 4, words["peak"].format(size=gigabytes(moments[highest].total)), size=12)]
    title = words["step_title"].format(ranks=numbers.plan.ranks, model="Qwen3-8B")
    return picture(404, title, [*parts, *legend(356, LIVE, words)])


def _step_area(left: float, slot: float, bottom: float, lower: list[float], upper: list[float], colour: str) -> str:
    """The area between two staircases, from the first slot that has any to the last."""
    places = [index for index, (low, high) in enumerate(zip(lower, upper, strict=True)) if high > low]
    inside = range(places[0], places[-1] + 1)
    there = [(left + slot * (index + edge), bottom - upper[index]) for index in inside for edge in (0, 1)]
    back = [(left + slot * (index + edge), bottom - lower[index]) for index in reversed(inside) for edge in (1, 0)]
    return f'<path d="M{" L".join(f"{x:.1f},{y:.1f}" for x, y in there + back)}Z" fill="{colour}"/>'


def _phase_marks(
    moments: tuple[Moment, ...], words: dict, left: float, slot: float, top: float, bottom: float
) -> list[str]:
    """A dashed line where a phase starts, its name under the axis."""
    found = [line(left, bottom, left + slot * len(moments), bottom)]
    for phase, word in words["phases"].items():
        places = [index for index, moment in enumerate(moments) if moment.phase == phase]
        start, stop = left + slot * places[0], left + slot * (places[-1] + 1)
        found += [line(x, top, x, bottom + 4, "#888888", "3 3") for x in (start, stop)]
        found.append(label((start + stop) / 2, bottom + 17, word, "middle", 12))
    return found


def figures(numbers: Numbers, words: dict) -> dict[str, str]:
    """The three figures of one language by their name."""
    return {
        "memory_states": states_figure(numbers, words),
        "memory_block": block_figure(numbers, words),
        "memory_step": step_figure(numbers, words),
    }
