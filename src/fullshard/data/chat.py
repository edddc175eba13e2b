"""From messages or text to token ids and the mask of supervised tokens, for any chat template: the one place where ids
are made, for training, evaluation and answers.

An assistant turn lies between two prefixes: the prompt before it, with the generation prompt, must begin the text up to
and including the turn. Where all turns begin the whole conversation it is one training row; where the template rewrites
earlier turns, each turn is a row of its own. Inside a turn the template's ``{% generation %}`` markers decide what is
supervised, where it has them. A template that allows none of this is refused with the property that stands in the way.
"""

from __future__ import annotations

import hashlib
import json
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path
from typing import Any

from fullshard.data.sources import Row
from fullshard.errors import Blame, DataError, ModelError

Message = dict[str, Any]
"""role and content; where present tool_calls, tool_call_id, name, reasoning_content, train."""

RENDER_SECONDS = 10.0  # processor time for one conversation; a template may loop for ever
PROBE = "fullshard"  # an answer whose place in the rendered text shows what the template writes around answers

GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
NO_TEMPLATE_HINT = (
    "Take an instruction-tuned model (its folder has a chat template), or train on plain text: rows with one column and"
    " data.columns: {body: text} in the recipe."
)
TEMPLATE_HINT = (
    "Repair chat_template in the model folder, for example by putting {% generation %} markers around answers; or"
    " change data.template_arguments."
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
    """The assistant turn ``messages[place]`` in ``encoded`` (the text up to and including it): tokens [start, end)."""

    place: int
    encoded: Encoded
    start: int
    end: int
    stop: int | None  # position of the end-of-turn token, always end - 1


def load_tokenizer(path: str | Path, add_tokens: Sequence[str] = ()) -> Any:
    """The tokenizer of a model folder with ``add_tokens``, without network. Raises ModelError where there is none."""
    from transformers import AutoTokenizer

    with Blame(ModelError, f"No usable tokenizer in {path}", "The folder needs a whole tokenizer.json."):
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        tokenizer.add_tokens(list(add_tokens))
        if tokenizer.chat_template:  # one text, or several of which one is the default
            tokenizer.get_chat_template().encode()
        return tokenizer


def added_ids(tokenizer: Any, add_tokens: Sequence[str]) -> tuple[int, ...]:
    """Ids of the tokens that ``load_tokenizer`` added."""
    return tuple(int(tokenizer.convert_tokens_to_ids(token)) for token in add_tokens)


def check_tokenizer(tokenizer: Any, num_embeddings: int) -> None:
    """Raise DataError if pad, bos, eos or unk has an id that the model's embedding (``num_embeddings`` rows) lacks."""
    for name in ("pad", "bos", "eos", "unk"):
        number = getattr(tokenizer, f"{name}_token_id")
        if number is not None and number >= num_embeddings:
            token = getattr(tokenizer, f"{name}_token")
            raise DataError(
                f"The tokenizer's {name} token {token!r} has id {number}, but the model's embedding has"
                f" {num_embeddings} rows (ids 0 to {num_embeddings - 1}).",
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
    """First 16 hex digits of the SHA-256 of the chat template, or of all where there are several; None without one."""
    if not tokenizer.chat_template:
        return None
    return hashlib.sha256(_template_text(tokenizer).encode()).hexdigest()[:16]


def _template_text(tokenizer: Any) -> str:
    """The chat template; several (with and without tools) as one JSON text; empty without one."""
    template = tokenizer.chat_template or ""
    return template if isinstance(template, str) else json.dumps(template, sort_keys=True)


class Renderer:
    """Renders conversations and texts with one tokenizer. ``loss_on``: "assistant", "last" or "all".

    ``template_arguments`` are variables of the chat template (enable_thinking: false); DataError for one that it never
    reads.
    """

    def __init__(
        self, tokenizer: Any, loss_on: str = "assistant", template_arguments: dict[str, Any] | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.loss_on = loss_on
        self.arguments = dict(template_arguments or {})
        text = _template_text(tokenizer)
        unread = [name for name in self.arguments if not re.search(rf"\b{re.escape(name)}\b", text)]
        if unread:
            raise DataError(
                f"data.template_arguments: the model's chat template never reads {', '.join(unread)}.",
                "Correct the name or remove it; the model's documentation names the variables of its template.",
            )
        self._encoded: tuple[str, Encoded] = ("", Encoded([], []))  # the last conversation: often asked for twice
        self._frame: tuple[str, str] | None = None
        self._written: set[str] = set()
        self.added_ids = set(tokenizer.added_tokens_decoder)
        special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        unknown = {tokenizer.unk_token_id} - {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
        self.special_ids = (set(tokenizer.all_special_ids) | special) - unknown

    def row(self, row: Row) -> list[Rendered]:
        """The training rows of a source row; a DataError names its file and line."""
        try:
            if row.messages is None:
                return [self.plain_text(row.text or "")]
            return self.chat(row.messages, row.tools)
        except DataError as error:
            raise DataError(f"{row.origin}: {error.message}", error.hint) from None

    def chat(self, messages: list[Message], tools: list[Any] | None = None) -> list[Rendered]:
        """The training rows of a conversation: one, or one per assistant turn where the template rewrites history.

        Messages with ``train: false`` are read and not learned. A row without any supervised token is returned as such
        (the audit decides). Raises DataError for a template with which no right mask can be made.
        """
        learned = [message.get("train") is not False for message in messages]
        messages = _without(messages, "train")
        self._require_written(messages, tools)
        whole_text = self.text(messages, False, tools)
        whole = self.encode(whole_text)
        self._encoded = (whole_text, whole)
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if self.loss_on == "last":
            answers = answers[-1:]
        answers = [i for i in answers if learned[i] and _says_something(messages[i])]
        if self.loss_on == "all":
            supervised = self._everything(whole_text, whole, messages, learned, tools)
            return [Rendered(whole.ids, supervised, self._stops_of_all(whole, messages, answers, tools))]
        if not answers:
            return [Rendered(whole.ids, [False] * len(whole.ids), [])]
        turns = [self._turn(messages, i, tools) for i in answers]
        if all(turn.encoded.ids[: turn.end] == whole.ids[: turn.end] for turn in turns):
            return [self._mark(whole, turns, messages, tools)]
        return [self._mark(turn.encoded, [turn], messages[: turn.place + 1], tools) for turn in turns]

    def prompt(self, prompt: str | list[Message], tools: list[Any] | None = None) -> list[int]:
        """Token ids up to where the answer begins: of a conversation, with the generation prompt, or of a plain text."""
        if not isinstance(prompt, str):
            return self.encode(self.text(_without(prompt, "train"), True, tools)).ids
        ids, eos = self._begin(prompt), self.tokenizer.eos_token
        is_added = ids[1:] and ids[-1] == self.tokenizer.eos_token_id and not prompt.rstrip().endswith(eos)
        return ids[:-1] if is_added else ids

    def answer(self, messages: list[Message], tools: list[Any] | None = None) -> list[int]:
        """Token ids of the last message, an assistant's, as training sees them, with the end-of-turn token."""
        if not _says_something(messages[-1]):
            return []
        turn = self._turn(_without(messages, "train"), len(messages) - 1, tools)
        return turn.encoded.ids[turn.start : turn.end]

    def plain_text(self, text: str) -> Rendered:
        """A text as the tokenizer begins it (with bos where it does so), eos at its end, everything supervised."""
        ids, eos = self._begin(text), self.tokenizer.eos_token_id
        if eos is not None and ids[-1:] != [eos]:
            ids.append(eos)
        return Rendered(ids, [True] * len(ids), [len(ids) - 1] if eos is not None else [])

    def _begin(self, text: str) -> list[int]:
        ids, bos = list(self.tokenizer(text, verbose=False)["input_ids"]), self.tokenizer.bos_token_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids  # the text begins with a written-out bos

    def text(self, messages: list[Message], generation_prompt: bool, tools: list[Any] | None = None) -> str:
        """The conversation as the template writes it. Raises DataError with the template's own complaint."""
        return self._apply(messages, tools, tokenize=False, add_generation_prompt=generation_prompt)

    def _apply(self, messages: list[Message], tools: list[Any] | None, **options: Any) -> Any:
        if not self.tokenizer.chat_template:
            raise DataError("The model has no chat template, but the rows are conversations.", NO_TEMPLATE_HINT)
        if not messages:
            raise DataError("The conversation begins with the assistant.", "Put a user message first.")
        roles = [message["role"] for message in messages]
        hint = "Put the system text into the first user message." if "system" in roles else "Change the rows."
        with Blame(DataError, f"The chat template refuses the roles {', '.join(roles)}", hint), _time_limit():
            return self.tokenizer.apply_chat_template(messages, tools=tools or None, **self.arguments, **options)

    def encode(self, text: str) -> Encoded:
        """Token ids of a rendered text. The template writes bos, or there is none: the tokenizer adds no token."""
        if text == self._encoded[0]:
            return self._encoded[1]
        if not self.tokenizer.is_fast:
            raise DataError(
                f"The tokenizer {type(self.tokenizer).__name__} cannot tell which characters a token covers.",
                "Convert it to a tokenizer.json.",
            )
        found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids, bos = list(found["input_ids"]), self.tokenizer.bos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            raise DataError(f"The chat template writes {self.tokenizer.bos_token} twice.", TEMPLATE_HINT)
        return Encoded(ids, list(found["offset_mapping"]))

    def _text_or_none(self, messages: list[Message], tools: list[Any] | None) -> str | None:
        try:
            return self.text(messages, False, tools)
        except DataError:  # a template may refuse an answer without words and calls
            return None

    def _require_written(self, messages: list[Message], tools: list[Any] | None) -> None:
        """Raise DataError where the template drops tools, tool calls or reasoning; each is tried once."""
        trials = [("tools", messages, tools, messages, None)] if tools else []
        for place, message in enumerate(messages):
            for name in {"tool_calls", "reasoning_content"} & {key for key in message if message[key]}:
                given = messages[: place + 1]
                trials.append((name, given, tools, [*given[:-1], *_without(given[-1:], name)], tools))
        for name, given, given_tools, lesser, lesser_tools in trials:
            if name not in self._written:
                if self.text(given, False, given_tools) == self._text_or_none(lesser, lesser_tools):
                    raise DataError(
                        f"The chat template does not write {name}, so nothing of it would be learned.",
                        f"Take a model whose template knows {name}, or remove it from the rows.",
                    )
                self._written.add(name)

    def _around(self, before: list[Message], tools: list[Any] | None) -> tuple[str, str]:
        """What the template writes before an answer where it ignores the generation prompt (else ""), and behind it."""
        if self._frame is None:
            through = self.text([*before, {"role": "assistant", "content": PROBE}], False, tools)
            prompt = self.text(before, True, tools)
            header, found, tail = through[len(commonprefix([prompt, through])) :].rpartition(PROBE)
            if not found:
                raise DataError(
                    "The chat template writes nothing of an assistant turn: the mask is empty.", TEMPLATE_HINT
                )
            is_ignored = header.strip() and prompt == self.text(before, False, tools)
            self._frame = (header.strip() if is_ignored else "", tail)
        return self._frame

    def _turn(self, messages: list[Message], place: int, tools: list[Any] | None) -> Turn:
        """Where the assistant turn ``messages[place]`` lies, by growing prefixes."""
        prompt = self.text(messages[:place], True, tools)
        through = self.text(messages[: place + 1], False, tools)
        header, tail = self._around(messages[:place], tools)
        shared = prompt if through.startswith(prompt) else commonprefix([prompt, through])
        if not self._has_markers(tools):
            if shared != prompt:
                raise DataError(
                    "The chat template's generation prompt (add_generation_prompt) does not begin the rendered assistant"
                    f" turn: it ends in {prompt[-30:]!r}, the turn has {through[len(shared) :][:30]!r}.",
                    TEMPLATE_HINT,
                )
            if header:
                raise DataError(
                    f"The chat template ignores add_generation_prompt: the role header {header!r} would be trained on.",
                    TEMPLATE_HINT,
                )
        encoded = self.encode(through)
        start = self._token_after(shared, encoded)
        stop = self._stop(encoded, start, len(through) - len(tail) if through.endswith(tail) else None)
        end = len(encoded.ids) if stop is None else stop + 1
        while stop is None and end > start and not self._is_shown(encoded, through, end - 1):
            end -= 1  # whitespace that the template puts after the turn
        words = [number for number in encoded.ids[start:end] if number not in self.special_ids]
        shown = repr((messages[place].get("content") or "")[:30])
        if not words:
            raise DataError(
                f"The chat template writes nothing of an assistant turn ({shown}): the mask is empty.", TEMPLATE_HINT
            )
        if all(number == self.tokenizer.unk_token_id for number in words):
            raise DataError(
                f"The tokenizer knows no word of an assistant turn ({shown}): each is {self.tokenizer.unk_token}.",
                "Take a model with a tokenizer for this language, or add the words: model.add_tokens.",
            )
        return Turn(place, encoded, start, end, stop)

    def _token_after(self, prompt: str, encoded: Encoded) -> int:
        """The first token of the turn: after the prompt's own tokens, or the first that begins past its characters."""
        ids = self.encode(prompt).ids
        if encoded.ids[: len(ids)] == ids:
            return len(ids)
        later = (i for i, (start, end) in enumerate(encoded.offsets) if start >= len(prompt) and end > start)
        return next(later, len(encoded.ids))

    def _stop(self, encoded: Encoded, start: int, content_end: int | None) -> int | None:
        """The first special (else added) token behind the content; the last one where its end is not known."""
        for wanted in (self.special_ids, self.added_ids):
            places = [i for i in range(start, len(encoded.ids)) if encoded.ids[i] in wanted]
            if content_end is None:
                places = places[-1:]
            else:
                places = [i for i in places if encoded.offsets[i][1] > content_end]
            if places:
                return places[0]
        return None

    def _is_shown(self, encoded: Encoded, text: str, place: int) -> bool:
        start, end = encoded.offsets[place]
        return encoded.ids[place] in self.special_ids or bool(text[start:end].strip())

    def _has_markers(self, tools: list[Any] | None) -> bool:
        return bool(GENERATION_MARKER.search(self.tokenizer.get_chat_template(tools=tools or None)))

    def _mark(
        self, encoded: Encoded, turns: list[Turn], messages: list[Message], tools: list[Any] | None
    ) -> Rendered:
        """The row ``encoded`` (of ``messages``) with its turns supervised: whole, or as far as markers say and the
        end-of-turn token where it stands just behind a marker."""
        ids, marked = encoded.ids, [True] * len(encoded.ids)
        if self._has_markers(tools):
            found = self._apply(messages, tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
            marked = [bool(value) for value in found["assistant_masks"]]
        supervised, stops = [False] * len(ids), []
        for turn in turns:
            inside = [i for i in range(turn.start, turn.end) if marked[i]]
            if inside and turn.stop is not None:
                behind = range(inside[-1] + 1, turn.stop + 1)
                if not self.tokenizer.decode(ids[behind.start : turn.stop]).strip():
                    inside += behind
                    stops.append(turn.stop)
            for i in inside:
                supervised[i] = True
        if not any(value and ids[i] not in self.special_ids for i, value in enumerate(supervised)):
            raise DataError(
                "The chat template's {% generation %} markers mark nothing in a row with an answer.", TEMPLATE_HINT
            )
        return Rendered(ids, supervised, stops)

    def _everything(
        self, text: str, whole: Encoded, messages: list[Message], learned: list[bool], tools: list[Any] | None
    ) -> list[bool]:
        """All tokens supervised but those of messages with ``train: false``, header and end of turn included."""
        supervised = [True] * len(whole.ids)
        for place in [i for i, value in enumerate(learned) if not value]:
            before = self.text(messages[:place], False, tools) if place else ""
            through = self.text(messages[: place + 1], False, tools)
            if not (text.startswith(through) and through.startswith(before)):
                raise DataError(
                    "The chat template rewrites earlier turns, so that train: false has no place of its own in the row.",
                    "Set data.loss_on: assistant, or leave train out.",
                )
            start, end = self._token_after(before, whole), self._token_after(through, whole)
            supervised[start:end] = [False] * (end - start)
        return supervised

    def _stops_of_all(
        self, whole: Encoded, messages: list[Message], answers: list[int], tools: list[Any] | None
    ) -> list[int]:
        """End-of-turn positions where everything is supervised; none where the template hides the turns."""
        stops = []
        for place in answers:
            try:
                turn = self._turn(messages, place, tools)
            except DataError:  # the mask does not need the turn here
                continue
            if turn.stop is not None and turn.encoded.ids[: turn.end] == whole.ids[: turn.end]:
                stops.append(turn.stop)
        return stops


def _without(messages: list[Message], name: str) -> list[Message]:
    """The messages without one key."""
    return [{key: value for key, value in message.items() if key != name} for message in messages]


def _says_something(message: Message) -> bool:
    spoken = (message.get("content") or "").strip()
    return bool(spoken or message.get("tool_calls") or message.get("reasoning_content"))


@contextmanager
def _time_limit() -> Iterator[None]:
    """DataError after RENDER_SECONDS of this process's time. Signals reach the main thread only; others have no limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def refuse(number: int, frame: object) -> None:
        raise DataError(f"The chat template does not end: stopped after {RENDER_SECONDS:g} s.", TEMPLATE_HINT)

    before = signal.signal(signal.SIGVTALRM, refuse)
    signal.setitimer(signal.ITIMER_VIRTUAL, RENDER_SECONDS, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before or signal.SIG_DFL)
