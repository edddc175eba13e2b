"""Writes docs/models.md and docs/models.zh-CN.md: python docs/models_page.py

Every line comes from a tiny random model of the family, built here, and from the tests that name it
(tests/families.py, tests/parity/test_families.py).
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

ENGLISH = {
    "title": "# Model families",
    "lead": (
        "Each family below is trained for two steps on two ranks with a tiny random model, full and LoRA, merged, opened"
        " with plain transformers, and compared with an unsharded run: losses within 1e-5, logits within 1e-4"
        " (`tests/parity/test_families.py`). Made by `python docs/models_page.py` with transformers {version}."
    ),
    "head": "| model_type | packing keeps rows apart | all-linear also adapts experts | DoRA | of note |",
    "yes": "yes",
    "no": "no",
    "none": "-",
    "notes": {
        "converted": "experts stacked on load, exported under the original names",
        "renamed": "tensor names differ in the files, kept in the export",
        "bias": "bias on the head",
        "scale": "logits scaled",
        "cap": "logits soft-capped",
        "eager": "no fused attention in transformers: scores of rows x rows exist",
        "router": "router left out of LoRA",
        "plain_experts": "LoRA leaves the experts as they are (PEFT cannot name them)",
    },
    "after": (
        "Packing by document costs the sum of the rows' squared lengths; by masks the square of the sequence. It is proven"
        " again at each start, on two rows of your data; a model that does not keep them apart is refused."
        " A family that is not in the table is tried, and stopped at the start where its weights, buffers, loss or"
        " adapters do not check out. DoRA cannot adapt stacked experts (PEFT): name the attention's modules instead."
        " A router loss is off, as in transformers, unless `train.router_loss: true`; it depends on how rows are split."
    ),
    "refused": "## Refused",
    "quantised": "Quantised weights (GPTQ, AWQ, FP8, MXFP4, bitsandbytes): they cannot be trained or merged exactly.",
}
CHINESE = ENGLISH | {
    "title": "# 模型系列",
    "lead": (
        "下表每个系列都用一个随机初始化的微型模型在两个进程上训练两步（全参数与 LoRA），合并后用原版 transformers 打开，"
        "并与不切分的训练对比：损失相差不超过 1e-5，logits 相差不超过 1e-4（`tests/parity/test_families.py`）。"
        "本页由 `python docs/models_page.py` 生成，transformers {version}。"
    ),
    "head": "| model_type | 打包时各行互不可见 | all-linear 是否也适配专家 | DoRA | 说明 |",
    "by document": "按文档计算",
    "by masks": "用掩码",
    "yes": "是",
    "no": "否",
    "notes": {
        "converted": "加载时专家权重被堆叠，导出时恢复原名",
        "renamed": "文件中的张量名不同，导出时保留",
        "bias": "输出层带偏置",
        "scale": "logits 有缩放",
        "cap": "logits 有软上限",
        "eager": "transformers 中没有融合注意力：会产生 行 x 行 的分数矩阵",
        "router": "LoRA 不包括路由器",
        "plain_experts": "LoRA 不改动专家（PEFT 无法指定它们）",
    },
    "after": (
        "按文档计算的打包，开销是各行长度平方之和；用掩码则是整个序列长度的平方。每次开始训练时都会用您的两行数据再验证一次；"
        "不能隔离的模型会被拒绝。表中没有的系列也可以尝试："
        "如果权重、缓冲区、损失或适配器核对不上，会在开始时停止。DoRA 不能适配堆叠的专家（PEFT 的限制），请改为指定注意力模块。"
        "路由损失默认关闭（与 transformers 相同），可用 `train.router_loss: true` 打开；它与行的划分方式有关。"
    ),
    "refused": "## 拒绝的系列",
    "quantised": "量化权重（GPTQ、AWQ、FP8、MXFP4、bitsandbytes）：不能精确训练或合并。",
}


def facts_of(family: str, folder: Path) -> dict[str, bool]:
    """What the page says of one family, read off its tiny model."""
    import torch
    from tiny_models import make_model
    from transformers import AutoModelForCausalLM

    from fullshard.config import LoraSection
    from fullshard.errors import ModelError
    from fullshard.model.adapters import adapter_places, inject_adapters
    from fullshard.model.load import WeightFiles, attention_for, build_on_meta, read_config
    from fullshard.model.weight_map import WeightMap
    from fullshard.train.loss import LossModel

    path = make_model(folder / family, family)
    model = build_on_meta(path)
    weights = WeightMap(model, WeightFiles(path), family)
    settings = model.config.get_text_config()
    used = [(name, weights.groups[name]) for name in weights.files.tensors if name in weights.groups]
    facts = {
        "converted": any(group.converter is not None for _, group in used),
        "renamed": any(list(group.outputs) not in ([name], []) for name, group in used),
        "bias": getattr(model.get_output_embeddings(), "bias", None) is not None,
        "scale": any(getattr(settings, key, None) for key in ("logits_scaling", "logit_scale")),
        "cap": bool(getattr(settings, "final_logit_softcapping", None)),
        "eager": attention_for(model.config) == "eager",
    }
    facts["renamed"] &= not facts["converted"]
    routers = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and "router" in type(m).__name__.lower()]
    facts["router"] = bool(routers)
    has_experts = any(".experts." in f".{name}" for name, _ in model.named_parameters())
    inject_adapters(model, LoraSection())
    facts["experts"] = any(place.layout.startswith("experts") for place in adapter_places(model))
    facts["plain_experts"] = has_experts and not facts["experts"]
    try:
        inject_adapters(build_on_meta(path), LoraSection(variant="dora"))
        facts["dora"] = True
    except ModelError:
        facts["dora"] = False
    facts["packs"] = ""
    for packing in (True, False):
        way = attention_for(read_config(path), packing)
        loss_model = LossModel(AutoModelForCausalLM.from_pretrained(path, attn_implementation=way)).eval()
        if not facts["packs"] and keeps_apart(loss_model):
            facts["packs"] = "by document" if loss_model.attends_by_document else "by masks"
    return facts


def keeps_apart(loss_model) -> bool:
    """Whether two packed rows have the logits that each has alone."""
    import torch

    from fullshard.model.attention import Documents

    rows = [torch.arange(8, 14), torch.arange(20, 27)]
    documents = Documents([[6, 7]]) if loss_model.attends_by_document else None
    positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
    with torch.no_grad():
        apart = torch.cat([loss_model(row[None], None) for row in rows], 1)
        packed = loss_model(torch.cat(rows)[None], None, positions, documents=documents)
    return float((packed - apart).abs().max()) < 1e-5 * float(apart.abs().max())


def page(words: dict, families: dict[str, dict[str, bool]]) -> str:
    """The page in one language."""
    import transformers

    from fullshard.model.load import REFUSED_FAMILIES

    lines = [
        words["title"],
        "",
        words["lead"].format(version=transformers.__version__),
        "",
        words["head"],
        "|---" * 5 + "|",
    ]
    for family, facts in families.items():
        notes = [text for key, text in words["notes"].items() if facts[key]]
        cells = [words["yes"] if facts[key] else words["no"] for key in ("packs", "experts", "dora")]
        cells[0] = words.get(facts["packs"], facts["packs"]) or words["no"]
        if not (facts["experts"] or facts["plain_experts"]):
            cells[1] = words["none"]
        lines.append(f"| {family} | {' | '.join(cells)} | {'; '.join(notes)} |")
    lines += ["", words["after"], "", words["refused"], ""]
    lines += [f"- `{family}`: {reason}" for family, reason in REFUSED_FAMILIES.items()]
    return "\n".join([*lines, f"- {words['quantised']}", ""])


def pages() -> dict[Path, str]:
    """Both pages by their file."""
    from families import FAMILIES

    with tempfile.TemporaryDirectory() as folder:
        families = {family: facts_of(family, Path(folder)) for family in FAMILIES}
    docs = ROOT / "docs"
    return {docs / "models.md": page(ENGLISH, families), docs / "models.zh-CN.md": page(CHINESE, families)}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
        print(path)
