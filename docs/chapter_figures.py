"""The figures of docs/chapter.md as SVG; their numbers are read from docs/chapter_outputs by chapter_page.py."""

from __future__ import annotations

import re

from memory_figures import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PINK,
    RED,
    SKY,
    YELLOW,
    label,
    legend,
    line,
    picture,
    rectangle,
)

ENGLISH = {
    "formats_title": "The bits of a number in four formats",
    "sign": "sign",
    "exponent": "exponent: the range",
    "mantissa": "mantissa: the precision",
    "bits": "{bits} bits",
    "mixed_title": "One step in mixed precision: what is 16-bit, what stays FP32",
    "low": "16 bits",
    "high": "FP32",
    "weights": "weights",
    "forward": "forward",
    "backward": "backward",
    "gradients": "gradients",
    "copy": "FP32 copy",
    "update": "AdamW's update",
    "sum": "gradients, summed",
    "moments": "Adam's two moments",
    "inside": "FP32 inside: norms' sums, softmax, loss",
    "round": "round",
    "unscale": "widen, divide by the loss scale",
    "unit_title": "One unit's weights on one rank through a step (order, not duration)",
    "network": "network",
    "compute": "compute",
    "held": "held",
    "gather": "all-gather",
    "others": "other units",
    "next": "next unit's gather",
    "reduce": "reduce-scatter",
    "whole": "whole",
    "share": "1/W",
    "free": "free",
    "whole_weights": "weights",
    "whole_gradients": "gradients",
    "buffer_title": "One block in one flat buffer: {count} parameters, {size} numbers, cut at any place",
    "ranks": "{ranks} ranks",
    "rank": "rank {rank}",
    "ranks_title": "One process a card: two machines with four cards each",
    "machine": "machine {number}",
    "link": "one process group: NCCL on CUDA, HCCL on Ascend, gloo on CPU",
    "starter": "torchrun or fullshard train: starts the ranks, ends all when one fails",
    "loss_title": "Loss of the run above",
    "loss": "training loss",
    "held_out": "held-out loss",
    "step": "step {step}",
    "adapter_title": "The adapter beside the base, and folded into it",
    "frozen": "frozen: O x I",
    "trained": "trained: R x (I + O)",
    "base": "base",
    "merged": "same size as W",
}
CHINESE = {
    "formats_title": "四种格式里一个数的各个位",
    "sign": "符号",
    "exponent": "指数：决定范围",
    "mantissa": "尾数：决定精度",
    "bits": "{bits} 位",
    "mixed_title": "混合精度的一步：哪些是 16 位，哪些保持 FP32",
    "low": "16 位",
    "high": "FP32",
    "weights": "权重",
    "forward": "前向",
    "backward": "反向",
    "gradients": "梯度",
    "copy": "FP32 副本",
    "update": "AdamW 更新",
    "sum": "求和后的梯度",
    "moments": "Adam 的两个矩",
    "inside": "内部用 FP32：归一化的求和、softmax、损失",
    "round": "舍入",
    "unscale": "转成 FP32，除以损失缩放",
    "unit_title": "一步之中，一个单元的权重在一个 rank 上的变化（只表示顺序，不表示时长）",
    "network": "通信",
    "compute": "计算",
    "held": "占用",
    "gather": "all-gather",
    "others": "其他单元",
    "next": "聚集下一个单元",
    "reduce": "reduce-scatter",
    "whole": "完整",
    "share": "1/W",
    "free": "释放",
    "whole_weights": "权重",
    "whole_gradients": "梯度",
    "buffer_title": "一层放进一个扁平缓冲区：{count} 个参数，{size} 个数，可以在任意位置切开",
    "ranks": "{ranks} 个 rank",
    "rank": "rank {rank}",
    "ranks_title": "一卡一进程：两台机器，每台四张卡",
    "machine": "机器 {number}",
    "link": "一个进程组：CUDA 用 NCCL，昇腾用 HCCL，CPU 用 gloo",
    "starter": "torchrun 或 fullshard train：启动各 rank，一个失败则全部结束",
    "loss_title": "上面这次训练的损失",
    "loss": "训练损失",
    "held_out": "留出集损失",
    "step": "第 {step} 步",
    "adapter_title": "适配器放在原模型旁边，再折叠进去",
    "frozen": "冻结：O x I",
    "trained": "训练：R x (I + O)",
    "base": "原模型",
    "merged": "与 W 大小相同",
}


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    """A straight arrow, level or upright."""
    along_x, along_y = (x2 > x1) - (x2 < x1), (y2 > y1) - (y2 < y1)
    back_x, back_y = x2 - 8 * along_x, y2 - 8 * along_y
    wings = " ".join(f"{back_x + side * along_y:.1f},{back_y + side * along_x:.1f}" for side in (-4, 4))
    return line(x1, y1, back_x, back_y) + f'<polygon points="{x2:.1f},{y2:.1f} {wings}"/>'


def box(x: float, y: float, width: float, height: float, colour: str, text: str, size: int = 13) -> str:
    """A filled box with its text in the middle."""
    return rectangle(x, y, width, height, colour) + label(x + width / 2, y + height / 2 + 5, text, "middle", size)


def formats_figure(bits: dict[str, tuple[int, int]], words: dict) -> str:
    """Sign, exponent and mantissa of each format; ``bits`` has exponent and mantissa bits by format."""
    parts, cell = [], 17.0
    for index, (name, (exponent, mantissa)) in enumerate(bits.items()):
        x, y = 84.0, 48.0 + 40 * index
        parts.append(label(x - 12, y + 19, name, "end"))
        for colour, count in ((RED, 1), (ORANGE, exponent), (SKY, mantissa)):
            parts += [rectangle(x + cell * bit, y, cell - 2, 26, colour) for bit in range(count)]
            if count > 1:
                parts.append(label(x + cell * count / 2, y + 18, str(count), "middle"))
            x += cell * count
        parts.append(label(x + 8, y + 18, words["bits"].format(bits=1 + exponent + mantissa)))
    colours = {"sign": RED, "exponent": ORANGE, "mantissa": SKY}
    return picture(244, words["formats_title"], [*parts, *legend(228, colours, words)])


def mixed_figure(words: dict) -> str:
    """The circle of one step: FP32 copy, 16-bit weights and gradients, FP32 update."""
    places = (24.0, 210.0, 396.0, 582.0)
    top = zip(places, ("weights", "forward", "backward", "gradients"), strict=True)
    parts = [box(x, 50, 150, 44, SKY, words[name]) for x, name in top]
    parts += [arrow(x + 150, 72, x + 186, 72) for x in places[:3]]
    parts += [
        label(378, 114, words["inside"], "middle", 12),
        box(24, 180, 150, 44, ORANGE, words["copy"]),
        box(396, 180, 150, 44, ORANGE, words["update"]),
        box(582, 180, 150, 44, ORANGE, words["sum"]),
        box(396, 256, 150, 36, ORANGE, words["moments"], 12),
        arrow(657, 94, 657, 180),
        label(648, 146, words["unscale"], "end", 12),
        arrow(582, 202, 546, 202),
        arrow(396, 202, 174, 202),
        arrow(99, 180, 99, 94),
        label(108, 146, words["round"], size=12),
        arrow(455, 224, 455, 256),
        arrow(487, 256, 487, 224),
    ]
    return picture(320, words["mixed_title"], [*parts, *legend(304, {"low": SKY, "high": ORANGE}, words)[:4]])


def unit_figure(words: dict) -> str:
    """Gather, compute, free, gather again, compute, reduce-scatter of one unit, and what it holds meanwhile."""
    network, compute, bottom, share = 50.0, 92.0, 250.0, 18.0
    moments = {"gather": (80, 170), "forward": (170, 290), "again": (410, 500), "backward": (500, 640)}
    parts = [label(68, y, words[name], "end") for name, y in (("network", 71), ("compute", 113), ("held", 206))]
    for start, stop in (moments["gather"], moments["again"]):
        parts.append(box(start, network, stop - start, 32, YELLOW, words["gather"], 12))
    parts += [
        box(174, network, 116, 32, GREY, words["next"], 11),
        box(504, network, 136, 32, GREY, words["next"], 11),
        box(642, network, 82, 32, PINK, words["reduce"], 11),
        box(170, compute, 120, 32, GREEN, words["forward"]),
        box(294, compute, 112, 32, GREY, words["others"], 12),
        box(500, compute, 140, 32, GREEN, words["backward"]),
    ]
    stairs = [(80, share), (80, 76), (290, 76), (290, share), (410, share), (410, 76), (640, 76), (640, share)]
    path = " ".join(f"L{x:.0f},{bottom - size:.0f}" for x, size in [*stairs, (744, share)])
    parts.append(f'<path d="M80,{bottom:.0f} {path} L744,{bottom:.0f}Z" fill="{SKY}"/>')
    edge = [(500, 76), (640, 100), (724, 100), (724, 36), (744, 36), (744, share), (640, share), (640, 76)]
    path = " L".join(f"{x:.0f},{bottom - size:.0f}" for x, size in edge)
    parts.append(f'<path d="M{path}Z" fill="{ORANGE}"/>')
    parts += [
        line(80, bottom, 750, bottom),
        label(185, bottom - 40, words["whole"], "middle", 12),
        label(350, bottom - 5, words["share"], "middle", 12),
        label(525, bottom - 40, words["whole"], "middle", 12),
        label(350, bottom - 24, f"{words['free']}", "middle", 12),
        label(682, bottom - 55, words["whole"], "middle", 12),
        label(682, bottom - 5, words["share"], "middle", 12),
    ]
    colours = {"whole_weights": SKY, "whole_gradients": ORANGE}
    return picture(290, words["unit_title"], [*parts, *legend(276, colours, words)])


def buffer_figure(sizes: dict[str, int], words: dict) -> str:
    """A block's parameters end to end in one buffer, and its equal shares on 2 and on 4 ranks."""
    total, left, width = sum(sizes.values()), 84.0, 660.0
    colours = (SKY, ORANGE, GREEN, PINK, YELLOW, RED)
    parts, x = [], left
    for (name, size), colour in zip(sizes.items(), colours, strict=True):
        room = size / total * width
        parts.append(rectangle(x, 50, room, 34, colour))
        if room > 40:
            parts.append(label(x + 6, 71, name.removeprefix("self_attn."), size=11))
        x += room
    parts.append(label(left + width, 44, ", ".join(name for name in sizes if "norm" in name), "end", 11))
    for ranks, y in ((2, 112.0), (4, 156.0)):
        parts.append(label(left - 10, y + 21, words["ranks"].format(ranks=ranks), "end", 12))
        for rank in range(ranks):
            x = left + width * rank / ranks
            parts.append(box(x + 1, y, width / ranks - 2, 32, GREY, words["rank"].format(rank=rank), 12))
            if rank:
                parts.append(line(x, 46, x, 90, INK, "4 3"))
    title = words["buffer_title"].format(count=len(sizes), size=f"{total:,}")
    return picture(204, title, parts)


def ranks_figure(words: dict) -> str:
    """Two machines, four processes each, with the variables that tell a process which one it is."""
    parts = []
    for machine in range(2):
        x = 16.0 + 370 * machine
        parts += [
            rectangle(x, 44, 358, 128, "#eeeeee"),
            label(x + 10, 62, words["machine"].format(number=machine), size=12),
        ]
        for card in range(4):
            left = x + 10 + 86 * card
            parts += [
                rectangle(left, 74, 80, 86, SKY),
                label(left + 40, 96, f"RANK={4 * machine + card}", "middle", 11),
                label(left + 40, 116, f"LOCAL_RANK={card}", "middle", 9),
                label(left + 40, 136, "WORLD_SIZE=8", "middle", 9),
                line(left + 40, 160, left + 40, 196),
            ]
    parts += [
        rectangle(16, 196, 728, 28, YELLOW),
        label(380, 215, words["link"], "middle"),
        label(380, 250, words["starter"], "middle", 12),
    ]
    return picture(266, words["ranks_title"], parts)


def loss_figure(training: list[tuple[int, float]], held_out: list[tuple[int, float]], words: dict) -> str:
    """Losses over steps, as the run printed them."""
    left, right, top, bottom = 56.0, 740.0, 44.0, 214.0
    last, highest = training[-1][0], max(loss for _, loss in training + held_out)
    tallest = int(highest) + 1

    def place(step: int, loss: float) -> tuple[float, float]:
        return left + step / last * (right - left), bottom - loss / tallest * (bottom - top)

    parts = []
    for loss in range(tallest + 1):
        y = place(0, loss)[1]
        parts += [line(left, y, right, y, GREY), label(left - 8, y + 4, str(loss), "end", 11)]
    for step, _ in held_out:
        anchor = {0: "start", last: "end"}.get(step, "middle")
        parts.append(label(place(step, 0)[0], bottom + 16, words["step"].format(step=step), anchor, 11))
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in training))
    parts.append(f'<polyline points="{points}" fill="none" stroke="{BLUE}" stroke-width="2"/>')
    for point in held_out:
        x, y = place(*point)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{RED}"/>')
    return picture(260, words["loss_title"], [*parts, *legend(250, {"loss": BLUE, "held_out": RED}, words)])


def adapter_figure(words: dict) -> str:
    """W + (alpha / R) B A = W'."""
    parts = [
        box(24, 50, 150, 150, SKY, "W", 18),
        label(196, 132, "+", "middle", 22),
        label(250, 130, "alpha / R", "middle", 14),
        label(298, 132, "x", "middle", 16),
        box(320, 50, 28, 150, ORANGE, "B", 16),
        label(334, 220, "O x R", "middle", 12),
        label(366, 132, "x", "middle", 16),
        box(384, 111, 150, 28, ORANGE, "A", 16),
        label(459, 158, "R x I", "middle", 12),
        label(562, 132, "=", "middle", 22),
        box(590, 50, 150, 150, GREEN, "W'", 18),
        label(99, 220, words["frozen"], "middle", 12),
        label(459, 180, words["trained"], "middle", 12),
        label(665, 220, words["merged"], "middle", 12),
    ]
    return picture(236, words["adapter_title"], parts)


def figures(outputs: dict[str, str], block: dict[str, int], words: dict) -> dict[str, str]:
    """The figures of one language by name; ``outputs``: what each command printed; ``block``: sizes by parameter."""
    rows = re.findall(r"^(\w+).*? 1 \+ +(\d+) \+ (\d+) = \d+", outputs["precision"], re.M)
    training = re.findall(r"^step (\d+)/\d+ +loss (\S+)", outputs["train"], re.M)
    held_out = re.findall(r"^step (\d+): held-out loss (\S+)", outputs["train"], re.M)
    curves = [[(int(step), float(loss)) for step, loss in found] for found in (training, held_out)]
    return {
        "chapter_formats": formats_figure({name: (int(e), int(m)) for name, e, m in rows}, words),
        "chapter_mixed": mixed_figure(words),
        "chapter_unit": unit_figure(words),
        "chapter_buffer": buffer_figure(block, words),
        "chapter_ranks": ranks_figure(words),
        "chapter_loss": loss_figure(*curves, words),
        "chapter_adapter": adapter_figure(words),
    }
