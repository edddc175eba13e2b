"""Words of the tables of docs/memory.md in both languages; the text around them is in docs/templates."""

ENGLISH = {
    "recomputed": "recomputed",
    "kept": "kept",
    "divided": {
        "DDP": "nothing",
        "ZeRO-1": "FP32 copy, Adam's moments",
        "ZeRO-2": "and the gradients",
        "ZeRO-3": "and the 16-bit weights: everything",
    },
    "when": {
        "always": "always",
        "backward": "backward",
        "head": "backward of the head",
        "block": "backward of a block",
        "late": "end of backward",
    },
    "causes": {
        "device context": "A fixed allowance: context, cuBLAS, collectives' buffers; outside torch's allocator.",
        "fp32 masters": "This rank's share of the weights, in FP32: what the optimizer changes and checkpoints keep.",
        "fp32 gradients": "This rank's share of the gradients' sum. They come as backward goes and are freed after each step.",
        "optimizer state": "Adam's two moments, FP32. They exist from the start, so the trial step already has them.",
        "gathered weights": "Whole units in bf16: the one in use and the next. Counted as two of [final norm, head].",
        "gradient reduction": "The FP32 buffer that the largest unit's gradients are sent from.",
        "block inputs": "With recomputation a block keeps its input and nothing else: tokens x blocks x 2 x width.",
        "recomputed block": "All that one block keeps, for as long as its backward runs (section 3).",
        "around the blocks": "What is kept outside of blocks: the last norm, rotary tables, masks that blocks share.",
        "logits chunk": "The head and the loss take the supervised positions piece by piece.",
        "allocator slack": "Stands for fragmentation: a share of all that comes and goes.",
    },
}

CHINESE = {
    "recomputed": "重算",
    "kept": "保留",
    "divided": {
        "DDP": "不切分",
        "ZeRO-1": "FP32 副本、Adam 的两个矩",
        "ZeRO-2": "再加梯度",
        "ZeRO-3": "再加 16 位权重：全部",
    },
    "when": {
        "always": "始终",
        "backward": "反向",
        "head": "输出层的反向",
        "block": "一层的反向",
        "late": "反向结束时",
    },
    "causes": {
        "device context": "固定预留：上下文、cuBLAS 工作区、集合通信缓冲区，不归 torch 的分配器管。",
        "fp32 masters": "本 rank 的那份权重，FP32：优化器更新的、检查点保存的都是它。",
        "fp32 gradients": "reduce-scatter 留在本 rank 的那份梯度之和。随反向逐渐出现，每步之后释放。",
        "optimizer state": "Adam 的两个矩，FP32。一开始就分配，所以试跑的一步已经包含它们。",
        "gathered weights": "完整单元的 bf16 权重：正在用的和下一个。按两个最大单元 [最终归一化, 输出层] 计。",
        "gradient reduction": "发送最大单元的梯度所用的 FP32 缓冲区。",
        "block inputs": "重算时每层只保留自己的输入：词元数 x 层数 x 2 x 宽度。",
        "recomputed block": "一层要保存的全部，只在这一层做反向时存在（第 3 节）。",
        "around the blocks": "各层之外保存的：最终归一化、旋转位置表、各层共用的掩码。",
        "logits chunk": "输出层和损失逐块处理受监督的位置。",
        "allocator slack": "代表碎片：所有临时显存的一个比例。",
    },
}
