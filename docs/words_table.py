"""Writes the table "words of other tools" into both READMEs and docs/words.md from src/fullshard/words.yaml.

Run: python docs/words_table.py. tests/unit/test_words.py holds that the files are as this script writes them.
"""

from __future__ import annotations

from pathlib import Path

from fullshard.errors import read_table
from fullshard.words import TOOLS

ROOT = Path(__file__).parents[1]
START, END = "<!-- words -->", "<!-- /words -->"
# The Chinese explanation of each row, by the row's first word.
CHINESE = {
    "model_name_or_path": "model 是一节：model: {path: ...}",
    "dataset": "一个或多个文件；数据形式自动识别",
    "dataset_dir": "把目录写进每个文件的路径",
    "val_set_size": "小于 1 的比例，或一个文件",
    "val_dataset": "一个文件",
    "cutoff_len": "超长的样本怎么办，见 data.too_long",
    "sample_packing": "打包在一起的样本互不可见",
    "dataset_text_field": "columns: {列名: text}",
    "template": "不用设置；使用 tokenizer 自带的对话模板",
    "lora_dropout": "这里的适配器没有 dropout，去掉即可",
    "pissa_init": "适配器按 LoRA 自己的方式初始化（A 均匀分布，B 为零）；其他初始化需要完整的权重或数据",
    "add_special_tokens": "新词元的列表；嵌入层和输出层会随之训练",
    "resize_vocab": "不用设置；词表随 model.add_tokens 增长",
    "adapter_name_or_path": "要从适配器开始：先 fullshard merge ADAPTER，再把合并后的目录写进 model.path",
    "per_device_train_batch_size": "不写时由 plan 选择",
    "gradient_accumulation_steps": "由 plan 根据 train.global_batch 和 train.micro_batch 决定；"
    "train.global_batch 是一整步的样本数，所有 rank 合计",
    "dataloader_drop_last": "每个 epoch 最后不满的一批",
    "warmup_ratio": "小于 1 是占总步数的比例，否则是步数",
    "bf16": "主权重始终是 fp32",
    "fp16": "主权重始终是 fp32，损失缩放由 fullshard 自己做",
    "tf32": "芯片没有 TF32 时拒绝",
    "gradient_checkpointing": "auto 只在显存不够时才重算",
    "save_steps": "单位是步",
    "eval_steps": "单位是步",
    "logging_steps": "不用设置；每一步都写入运行目录的 metrics.jsonl",
    "report_to": "列表：[tensorboard, wandb, swanlab]；metrics.jsonl 总会写",
    "output_dir": "一个新目录",
    "overwrite_output_dir": "运行目录从不覆盖，请换一个新目录",
    "deepspeed": "分片始终开启，不需要配置文件，只有 --ranks N",
    "quantization_bit": "尚未支持 QLoRA；method: lora 时冻结的原模型以 bf16 分片存放在各个 rank 上",
    "flash_attn": "不用设置；模型支持时用 PyTorch 的 scaled_dot_product_attention",
    "stage": "只有监督微调；stage pt 对应 data.loss_on: all",
    "pt": "加上 data.loss_on: all",
    "rlhf": "只有监督微调；偏好训练尚未支持",
    "infer": "或 fullshard generate MODEL PROMPT",
    "deploy": "OpenAI 协议：装有 vLLM 时用 vLLM，否则用 transformers 自带的服务",
    "webui": "在终端里；没有网页界面",
}
HEADS = {
    "en": ("there", "here", "to know", "Keys and verbs of "),
    "zh": ("别处的写法", "这里的写法", "说明", "这些工具的配置项和命令："),
}


def make_table(language: str) -> str:
    """The table in ``en`` or ``zh``, folded, between its markers."""
    there, here, to_know, title = HEADS[language]
    tools = ", ".join(f"{name} ({letter})" for letter, name in TOOLS.items())
    lines = [START, "<details>", f"<summary>{title}{tools}</summary>", "", f"| {there} | {here} | {to_know} |"]
    lines.append("|---|---|---|")
    for row in read_table("words.yaml"):
        words = row["words"]
        first = next(iter(words))
        note = row.get("note", "") if language == "en" else CHINESE.get(first, "")
        pairs = [pair.split("=") for pair in row.get("values", "").split() if "=" in pair]
        changed = ", ".join(f"`{theirs}` → `{ours}`" for theirs, ours in pairs if theirs != ours)
        note = ("; " if language == "en" else "；").join(filter(None, (changed, note)))
        given = ", ".join(f"`{word}` {tools}" for word, tools in words.items())
        here = f"`{row['here']}`" if "here" in row else "-"
        lines.append(f"| {given} | {here} | {note} |")
    return "\n".join([*lines, "", "</details>", END])


def with_table(text: str, language: str) -> str:
    """A page with its table made anew."""
    before, _, rest = text.partition(START)
    return before + make_table(language) + rest.partition(END)[2]


def make_page(language: str) -> str:
    """docs/words.md or docs/words.zh-CN.md: the table with a few lines around it."""
    table = make_table(language).replace("<details>", "<details open>")
    if language == "en":
        return f"""# Words of other tools

[中文](words.zh-CN.md)

A recipe or a command line with a word of another tool is refused (exit code 2), with the name used here and, where
it can be told, the value: `finetuning_type: lora` is answered with `method: lora`. The words, and the versions of the
tools they were looked up in, are in `src/fullshard/words.yaml`; `python docs/words_table.py` makes this page from it.

{table}
"""
    return f"""# 其他工具的写法

[English](words.md)

配方或命令行里出现其他工具的写法时，fullshard 会拒绝（退出码 2），并告诉你这里的名字；能换算的值也一并给出：
`finetuning_type: lora` 的回答是 `method: lora`。全部词条以及查证时各工具的版本记录在 `src/fullshard/words.yaml`；
本页由 `python docs/words_table.py` 生成。

{table}
"""


PAGES = {"README.md": "en", "README.zh-CN.md": "zh", "docs/words.md": "en", "docs/words.zh-CN.md": "zh"}


def expected(page: str) -> str:
    """What the page must hold."""
    language = PAGES[page]
    if page.startswith("docs/"):
        return make_page(language)
    return with_table((ROOT / page).read_text(encoding="utf-8"), language)


if __name__ == "__main__":
    for name in PAGES:
        (ROOT / name).write_text(expected(name), encoding="utf-8")
