"""From messages or text to token ids and the mask of supervised tokens, for any chat template.

The mask is found in three ways, in this order: the template's own ``{% generation %}`` markers; else growing prefixes
(the prompt before an assistant turn, with the generation prompt, must begin the text that includes the turn, and that
must begin the whole conversation); else, where a template rewrites earlier turns, one training row per assistant turn.
A template that allows none of them is refused with the property that stands in the way.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.errors import Blame, DataError, ModelError
from fullshard.run_folder import read_json

GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
NO_TEMPLATE_HINT = (
    "Take an instruction-tuned model (its folder has a chat template), or train on plain text: rows with one column and"
    " data.columns: {body: text} in the recipe."
)
TEMPLATE_HINT = (
    "Repair chat_template in the model folder, for example by putting {% generation %} markers around answers."
)


@dataclass(frozen=True)
class Rendered:
    """One training row. ``stops`` are the positions of supervised end-of-turn tokens."""

    ids: list[int]
    supervised: list[bool]
    stops: list[int]


@dataclass(frozen=True)
class Encoded:
    """A text as token ids with the characters [start, end) that each token covers."""

    ids: list[int]
    offsets: list[tuple[int, int]]


@dataclass(frozen=True)
class Turn:
    """An assistant turn inside ``encoded`` (the conversation up to and including it): tokens [start, end)."""

    encoded: Encoded
    start: int
    end: int
    stop: int | None  # position of the end-of-turn token, always end - 1


def load_tokenizer(path: str | Path, add_tokens: Sequence[str] = ()) -> Any:
    """The tokenizer of a model folder with ``add_tokens``, without network.

    Raises ModelError where there is none, and where a token is none to add: it has a trained row already.
    """
    from transformers import AutoTokenizer

    with Blame(ModelError, f"No usable tokenizer in {path}", "The folder needs a whole tokenizer.json."):
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        rows, vocabulary = (num_embeddings(Path(path)) or 0, tokenizer.get_vocab()) if add_tokens else (0, {})
        for token in add_tokens:
            if vocabulary.get(token, rows) < rows:
                message = f"model.add_tokens: {token!r} is a token of the model already (id {vocabulary[token]})."
                raise ModelError(message, "Leave it out; its row would start anew.")
        tokenizer.add_tokens(list(add_tokens))
        if tokenizer.chat_template:  # one text, or several of which one is the default
            tokenizer.get_chat_template().encode()
        return tokenizer


def num_embeddings(model: Path) -> int | None:
    """Rows of the embedding by the model's config.json; None where it does not say."""
    if not (model / "config.json").is_file():
        return None
    settings = read_json(model / "config.json")
    size = settings.get("vocab_size") or (settings.get("text_config") or {}).get("vocab_size")
    return int(size) if size else None


def added_ids(tokenizer: Any, add_tokens: Sequence[str]) -> tuple[int, ...]:
    """Ids of the tokens that ``load_tokenizer`` added."""
    return tuple(int(tokenizer.convert_tokens_to_ids(token)) for token in add_tokens)


def check_tokenizer(tokenizer: Any, num_rows: int) -> None:
    """Raise DataError if pad, bos, eos or unk has an id that the model's embedding (``num_rows``) lacks."""
    for name in ("pad", "bos", "eos", "unk"):
        number = getattr(tokenizer, f"{name}_token_id")
        if number is not None and number >= num_rows:
            token = getattr(tokenizer, f"{name}_token")
            raise DataError(
                f"The tokenizer's {name} token {token!r} has id {number}, but the model's embedding has"
                f" {num_rows} rows (ids 0 to {num_rows - 1}).",
                f"Grow the vocabulary by it: model.add_tokens='[\"{token}\"]'  Or choose a {name} token that the model"
                " has (eos serves as pad here).",
            )


def choose_pad_id(tokenizer: Any) -> int:
    """The id that fills batches: pad, else eos, else 0. Fills are masked by length, so any id of the table serves."""
    for number in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if number is not None:
            return int(number)
    return 0


def template_hash(tokenizer: Any) -> str | None:
    """First 16 hex digits of the chat template's SHA-256; None without a template."""
    if not tokenizer.chat_template:
        return None
    return hashlib.sha256(tokenizer.get_chat_template().encode()).hexdigest()[:16]


def render(tokenizer: Any, messages: list[dict[str, str]], loss_on: str) -> tuple[list[int], list[bool]]:
    """Token ids and supervised mask of one conversation; DataError if the template needs several rows for it."""
    rows = Renderer(tokenizer, loss_on).chat(messages)
    if len(rows) > 1:
        raise DataError("The chat template rewrites earlier turns; this conversation needs a row per answer.", "")
    return rows[0].ids, rows[0].supervised


def render_prompt(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """Token ids of a conversation that waits for the assistant's answer (with the generation prompt)."""
    renderer = Renderer(tokenizer, "assistant")
    return renderer.encode(renderer.text(messages, True)).ids


class Renderer:
    """Renders conversations and texts with one tokenizer. ``loss_on``: "assistant", "last" or "all"."""

    def __init__(self, tokenizer: Any, loss_on: str) -> None:
        self.tokenizer = tokenizer
        self.loss_on = loss_on
        self._encoded: tuple[str, Encoded] = ("", Encoded([], []))  # the last conversation: often asked for twice
        added = tokenizer.added_tokens_decoder
        self.special_ids = set(tokenizer.all_special_ids) | {n for n, token in added.items() if token.special}
        self.has_markers = bool(tokenizer.chat_template) and bool(
            GENERATION_MARKER.search(tokenizer.get_chat_template())
        )

    def chat(self, messages: list[dict[str, str]]) -> list[Rendered]:
        """The training rows of a conversation: one, or one per assistant turn where the template rewrites history.

        A row without any supervised token is returned as such (the audit decides). Raises DataError for a template
        with which no right mask can be made.
        """
        whole_text = self.text(messages, False)
        whole = self.encode(whole_text)
        self._encoded = (whole_text, whole)
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if self.loss_on == "all":
            return [Rendered(whole.ids, [True] * len(whole.ids), self._stops_of_all(whole, messages, answers))]
        if self.loss_on == "last":
            answers = answers[-1:]
        answers = [i for i in answers if messages[i]["content"].strip()]
        if not answers:
            return [Rendered(whole.ids, [False] * len(whole.ids), [])]
        if self.has_markers:
            return [self._marked(messages, answers)]
        turns = [self._turn(messages, i) for i in answers]
        if all(turn.encoded.ids[: turn.end] == whole.ids[: turn.end] for turn in turns):
            return [_mark(whole, turns)]
        return [_mark(turn.encoded, [turn]) for turn in turns]

    def plain_text(self, text: str) -> Rendered:
        """A text as the tokenizer begins it (with bos where it does so), eos at its end, everything supervised."""
        ids = list(self.tokenizer(text, verbose=False)["input_ids"])
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        if bos is not None and ids[:2] == [bos, bos]:  # the text begins with a written-out bos
            ids = ids[1:]
        if eos is not None and ids[-1:] != [eos]:
            ids.append(eos)
        return Rendered(ids, [True] * len(ids), [len(ids) - 1] if eos is not None else [])

    def text(self, messages: list[dict[str, str]], generation_prompt: bool) -> str:
        """The conversation as the template writes it. Raises DataError with the template's own complaint."""
        if not self.tokenizer.chat_template:
            raise DataError("The model has no chat template, but the rows are conversations.", NO_TEMPLATE_HINT)
        if not messages:
            raise DataError("The conversation begins with the assistant.", "Put a user message first.")
        roles = ", ".join(message["role"] for message in messages)
        with Blame(DataError, f"The chat template refuses the roles {roles}", "Change the rows."):
            return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt)

    def encode(self, text: str) -> Encoded:
        """Token ids of a rendered text; special tokens are in the text already, so none is added."""
        if text == self._encoded[0]:
            return self._encoded[1]
        if not self.tokenizer.is_fast:
            raise DataError(
                f"The tokenizer {type(self.tokenizer).__name__} cannot tell which characters a token covers.",
                "Convert it to a tokenizer.json.",
            )
        found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return Encoded(list(found["input_ids"]), list(found["offset_mapping"]))

    def _turn(self, messages: list[dict[str, str]], place: int) -> Turn:
        """Where the assistant turn ``messages[place]`` lies, by growing prefixes."""
        prompt = self.text(messages[:place], True)
        through = self.text(messages[: place + 1], False)
        if not through.startswith(prompt):
            raise DataError(
                "The chat template's generation prompt (add_generation_prompt) does not begin the rendered assistant"
                f" turn: it ends in {prompt[-30:]!r}, the turn has {through[len(_common(prompt, through)) :][:30]!r}.",
                TEMPLATE_HINT,
            )
        encoded = self.encode(through)
        start = self._token_after(prompt, encoded)
        content = messages[place]["content"].strip()
        found = through.find(content, len(prompt))
        header = through[len(prompt) : found].strip() if found >= 0 else ""
        if (header or found < 0) and prompt == self.text(messages[:place], False):
            shown = header or through[len(prompt) :][:30]
            raise DataError(
                f"The chat template ignores add_generation_prompt: the role header {shown!r} would be trained on.",
                TEMPLATE_HINT,
            )
        stop = self._stop_after(encoded, start, found + len(content) if found >= 0 else None)
        end = len(encoded.ids) if stop is None else stop + 1
        while stop is None and end > start and not self._shown(encoded, through, end - 1):
            end -= 1  # whitespace that the template puts after the turn
        if not any(encoded.ids[i] not in self.special_ids for i in range(start, end)):
            raise DataError(
                f"The chat template writes nothing of an assistant turn ({content[:30]!r}): the mask is empty.",
                TEMPLATE_HINT,
            )
        return Turn(encoded, start, end, stop)

    def _token_after(self, prompt: str, encoded: Encoded) -> int:
        """The first token of the turn: after the prompt's own tokens, or the first that begins past its characters."""
        ids = self.encode(prompt).ids
        if encoded.ids[: len(ids)] == ids:
            return len(ids)
        later = (i for i, (start, end) in enumerate(encoded.offsets) if start >= len(prompt) and end > start)
        return next(later, len(encoded.ids))

    def _stop_after(self, encoded: Encoded, start: int, content_end: int | None) -> int | None:
        """The first special token behind the content; where the content was rewritten, the last special token."""
        special = [i for i in range(start, len(encoded.ids)) if encoded.ids[i] in self.special_ids]
        if content_end is None:
            return special[-1] if special else None
        return next((i for i in special if encoded.offsets[i][0] >= content_end), None)

    def _shown(self, encoded: Encoded, text: str, place: int) -> bool:
        start, end = encoded.offsets[place]
        return encoded.ids[place] in self.special_ids or bool(text[start:end].strip())

    def _marked(self, messages: list[dict[str, str]], answers: list[int]) -> Rendered:
        """The row of a template with generation markers; end-of-turn tokens just behind a marker are added."""
        found = self.tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids = list(found["input_ids"])
        supervised = [bool(value) for value in found["assistant_masks"]]
        if self.loss_on == "last":
            before = len(self.encode(self.text(messages[: answers[-1]], True)).ids)
            supervised = [value and i >= before for i, value in enumerate(supervised)]
        if not any(supervised[i] and ids[i] not in self.special_ids for i in range(len(ids))):
            raise DataError(
                "The chat template's {% generation %} markers mark nothing in a row with an answer.", TEMPLATE_HINT
            )
        end_ids = self._end_of_turn(messages[: answers[-1] + 1])
        stops = []
        ends = [i for i, value in enumerate(supervised) if value and not any(supervised[i + 1 : i + 2])]
        for i in ends:
            last = i  # the last token inside this marker
            while last > 0 and supervised[last - 1] and not self.tokenizer.decode([ids[last]]).strip():
                last -= 1
            if ids[last] in self.special_ids:
                supervised[last + 1 : i + 1] = [False] * (i - last)
                stops.append(last)
                continue
            behind = i + 1
            while behind < len(ids) and not self.tokenizer.decode([ids[behind]]).strip():
                behind += 1
            if behind < len(ids) and ids[behind] in end_ids:
                supervised[i + 1 : behind + 1] = [True] * (behind - i)
                stops.append(behind)
        return Rendered(ids, supervised, stops)

    def _end_of_turn(self, messages: list[dict[str, str]]) -> set[int]:
        """The id behind the last marker of a conversation that ends with the assistant: no role can follow there."""
        found = self.tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = list(found["input_ids"]), list(found["assistant_masks"])
        last = max((i for i, value in enumerate(mask) if value), default=len(ids))
        return set([i for i in ids[last + 1 :] if i in self.special_ids][:1])

    def _stops_of_all(self, whole: Encoded, messages: list[dict[str, str]], answers: list[int]) -> list[int]:
        """End-of-turn positions where everything is supervised; none where the template hides the turns."""
        stops = []
        for place in answers:
            try:
                turn = self._turn(messages, place)
            except DataError:  # the mask does not need the turn here
                continue
            if turn.stop is not None and turn.encoded.ids[: turn.end] == whole.ids[: turn.end]:
                stops.append(turn.stop)
        return stops


def _mark(encoded: Encoded, turns: list[Turn]) -> Rendered:
    supervised = [False] * len(encoded.ids)
    for turn in turns:
        supervised[turn.start : turn.end] = [True] * (turn.end - turn.start)
    return Rendered(encoded.ids, supervised, [turn.stop for turn in turns if turn.stop is not None])


def _common(first: str, second: str) -> str:
    """The common beginning of two strings."""
    length = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    return first[:length]
