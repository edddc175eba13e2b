"""Makes the tiny model and the data of docs/chapter.md, in seconds and without the network.

Run: ``python examples/chapter_model.py runs/chapter``. It writes

- ``model``: a llama of two blocks with a tokenizer of whole words, trained here until it answers three words with the
  first of them. It is the base model that the chapter tunes;
- ``chat.jsonl``: questions of three words, each answered with the last of them: what tuning is to teach;
- ``new.jsonl``: 40 questions like those of ``chat.jsonl`` and not among them;
- ``qwen3_8b/config.json``: the settings of Qwen3-8B, no weights: to estimate and to plan with.
"""

import json
import random
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

WORD_TEXT = "red blue green white black sun moon star sky sea tree leaf root sand wind rain snow fire cat dog bird fish"
WORDS = WORD_TEXT.split()
MARKS = ["<pad>", "<unk>", "<|user|>", "<|assistant|>", "<|end|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
QWEN = Path(__file__).parents[1] / "src" / "fullshard" / "planning" / "models" / "Qwen--Qwen3-8B.json"
STEPS, ROWS, LEARNING_RATE = 200, 64, 0.003


def make_tokenizer():
    """One token a word; the chat format is the template's."""
    ids = {token: number for number, token in enumerate(MARKS + WORDS)}
    words = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", unk_token="<unk>", eos_token="<|end|>", model_max_length=512
    )
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS[2:4]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def chat(question, answer):
    """A row in the form of chat data."""
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def train_base(tokenizer):
    """A model that answers three words with the first."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"pad_token_id": 0, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = AutoConfig.for_model(
        "llama", vocab_size=len(tokenizer), num_hidden_layers=2, max_position_embeddings=512, **shape, **ends
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for _ in range(STEPS):
        words = [random.choices(WORDS, k=3) for _ in range(ROWS)]
        rows = [chat(" ".join(three), three[0])["messages"] for three in words]
        tokens = torch.tensor(tokenizer.apply_chat_template(rows, return_dict=False))
        labels = tokens.clone()
        labels[:, :-2] = -100  # only the answer and the end of it count
        loss = model(tokens, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"model: {model.num_parameters():,} parameters, loss {loss.item():.4f} after {STEPS} steps")
    return model


def main(folder):
    """Write everything into ``folder``."""
    random.seed(0)
    tokenizer = make_tokenizer()
    train_base(tokenizer).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    questions = [random.sample(WORDS, 3) for _ in range(2000)]
    questions = [question for i, question in enumerate(questions) if question not in questions[:i]]
    rows = [json.dumps(chat(" ".join(three), three[2])) + "\n" for three in questions]
    (folder / "chat.jsonl").write_text("".join(rows[:-40]), encoding="utf-8")
    (folder / "new.jsonl").write_text("".join(rows[-40:]), encoding="utf-8")
    print(f"chat.jsonl: {len(rows) - 40:,} rows; new.jsonl: 40 rows")
    (folder / "qwen3_8b").mkdir(exist_ok=True)
    settings = json.loads(QWEN.read_text(encoding="utf-8"))
    (folder / "qwen3_8b" / "config.json").write_text(json.dumps(settings.get("config", settings)), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
