"""From messages or text to token ids (made only here) and supervised masks, for any template: see docs/templates.md."""

import json
import logging
import re
import signal
import threading
from collections import namedtuple
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from os.path import commonprefix
from pathlib import Path
from typing import Any, ClassVar
from fullshard.data.sources import Row
from fullshard.errors import Blame, DataError, ModelError, refusal
from fullshard.frozen import Frozen
from fullshard.run_folder import read_json

Message = dict[str, Any]  # role, content; where present tool_calls, tool_call_id, name, reasoning_content, train
Variables, Tools = dict[str, Any] | None, list[Any] | None
RENDER_SECONDS = 10.0  # processor time for one conversation; a template may loop for ever
MOST_MESSAGES = 4000  # of one conversation; the time for it grows with the square
PROBE = "fullshard"  # an answer whose place in the rendered text shows what the template writes around answers
QUESTION = {"role": "user", "content": "x"}
READ_AS = {"reasoning_content": "reasoning_content|reasoning|thinking"}  # transformers passes it under all three
GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Rendered(Frozen):
    """One training row. ``stops`` are the positions of supervised end-of-turn tokens."""

    ids: list[int]
    supervised: list[bool]
    stops: list[int]

    def part(self, start: int, end: int) -> "Rendered":
        """Its tokens [start, end) as a row of their own."""
        stops = [stop - start for stop in self.stops if start <= stop < end]
        return Rendered(self.ids[start:end], self.supervised[start:end], stops)


Encoded = namedtuple("Encoded", "ids offsets")  # a text's token ids, and the characters [start, end) of each
# The turn messages[place] in ``encoded`` (the text up to its end): tokens [start, end); ``stop``: end - 1, or None
Turn = namedtuple("Turn", "place encoded start end stop")


def load_tokenizer(path: str | Path, add_tokens: Sequence[str] = ()) -> Any:
    """The tokenizer of a model folder with ``add_tokens``. ModelError: there is none, or it has one of these."""
    from transformers import AutoTokenizer

    with Blame(ModelError, f"No usable tokenizer in {path}", "The folder needs a whole tokenizer.json."):
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        rows, vocabulary = (num_embeddings(Path(path)) or 0, tokenizer.get_vocab()) if add_tokens else (0, {})
        if known := [token for token in add_tokens if vocabulary.get(token, rows) < rows]:
            raise refusal("token_known", token=known[0], id=vocabulary[known[0]])
        tokenizer.add_tokens(list(add_tokens))
        if tokenizer.chat_template:  # one text, or several of which one is the default
            tokenizer.get_chat_template().encode()
        return tokenizer


def num_embeddings(model: Path) -> int | None:
    """Rows of the embedding by the model's config.json; None where it does not say."""
    settings = read_json(model / "config.json", optional=True)
    size = settings.get("vocab_size") or (settings.get("text_config") or {}).get("vocab_size")
    return int(size) if size else None


def added_ids(tokenizer: Any, add_tokens: Sequence[str]) -> tuple[int, ...]:
    """Ids of the tokens that ``load_tokenizer`` added."""
    return tuple(int(tokenizer.convert_tokens_to_ids(token)) for token in add_tokens)


def check_tokenizer(tokenizer: Any, num_rows: int) -> None:
    """Raise DataError if pad, bos, eos or unk has an id that the model's embedding (``num_rows``) lacks."""
    for name in ("pad", "bos", "eos", "unk"):
        if (number := getattr(tokenizer, f"{name}_token_id")) is not None and number >= num_rows:
            token = getattr(tokenizer, f"{name}_token")
            raise refusal("token_outside", name=name, token=token, id=number, rows=num_rows, last=num_rows - 1)


def choose_pad_id(tokenizer: Any) -> int:
    """The id that fills batches: pad, else eos, else 0. Fills are masked by length, so any id of the table serves."""
    return next((int(n) for n in (tokenizer.pad_token_id, tokenizer.eos_token_id) if n is not None), 0)


class Renderer:
    """Renders by the template. ``loss_on``: "assistant", "last" or "all". DataError: an argument unknown to it."""

    _taken: ClassVar[dict[tuple[str, str], bool]] = {}  # (template, role)

    def __init__(self, tokenizer: Any, loss_on: str = "assistant", template_arguments: Variables = None) -> None:
        self.tokenizer, self.loss_on, self.arguments = tokenizer, loss_on, dict(template_arguments or {})
        template = tokenizer.chat_template or ""  # or several by name
        self._template = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
        self._require_read(self.arguments, "Correct the name in data.template_arguments, or remove it.")
        self._tools: Tools = None  # of the conversation at hand
        self._whole: tuple[list[Message], str, Encoded] = ([], "", Encoded([], []))  # the last one: asked for twice
        self._frame: tuple[str, str] | None = None
        added = tokenizer.added_tokens_decoder
        unknown = {tokenizer.unk_token_id} - {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
        special = set(tokenizer.all_special_ids) | {number for number, token in added.items() if token.special}
        self.special_ids, self.added_ids = special - unknown, special.union(added) - unknown

    def row(self, row: Row) -> list[Rendered]:
        """The training rows of a source row; a DataError names its file and line."""
        try:
            return [self.plain_text(row.text or "")] if row.messages is None else self.chat(row.messages, row.tools)
        except DataError as error:
            raise DataError(f"{row.origin}: {error.message}", error.hint) from None

    def chat(self, messages: list[Message], tools: Tools = None) -> list[Rendered]:
        """The training rows of a conversation: one, or one per assistant turn where the template rewrites history. A
        row without any supervised token is returned as such. Raises DataError where no right mask can be made."""
        if self.loss_on != "all" and any(each.get("train") and each["role"] != "assistant" for each in messages):
            raise refusal("train_of_others")
        if len(messages) > MOST_MESSAGES:
            raise refusal("too_many_messages", count=len(messages), most=MOST_MESSAGES)
        messages = self._begin(messages, tools)
        learned = [message.get("train") is not False for message in messages]
        given = [name for name in ("tool_calls", "reasoning_content") if any(message.get(name) for message in messages)]
        self._require_read(["tools", *given] if tools else given, "Take a model that knows it, or remove it.")
        whole = self.encode(text := self._text(messages))
        self._whole = (messages, text, whole)
        everything, first = self.loss_on == "all", -1 if self.loss_on == "last" else 0
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"][first:]
        answers = [i for i in answers if learned[i] and _says_something(messages[i]) and (i or not everything)]
        turns = [self._turn(messages, i) for i in answers]
        nested = [turn for turn in turns if turn.encoded.ids[: turn.end] == whole.ids[: turn.end]]
        if everything:
            stops = [turn.stop for turn in nested if turn.stop is not None]
            return [Rendered(whole.ids, self._everything(text, whole, messages, learned), stops)]
        if len(nested) == len(turns):
            return [self._mark(whole, turns, messages)]
        return [self._mark(turn.encoded, [turn], messages[: turn.place + 1]) for turn in turns]

    def prompt(self, prompt: str | list[Message], tools: Tools = None) -> list[int]:
        """Token ids up to where the answer begins: of a conversation (with the generation prompt) or a plain text."""
        if not isinstance(prompt, str):
            return self.encode(self._text(self._begin(prompt, tools), True)).ids
        ids, eos = self._text_ids(prompt), self.tokenizer.eos_token_id
        is_added = ids[1:] and ids[-1] == eos and not prompt.rstrip().endswith(self.tokenizer.eos_token)
        return ids[:-1] if is_added else ids

    def answer(self, messages: list[Message], tools: Tools = None) -> list[int]:
        """Token ids of the last message, an assistant's, as training sees them, with the end-of-turn token."""
        if not _says_something(messages[-1]):
            return []
        turn = self._turn(begun := self._begin(messages, tools), len(begun) - 1)
        return turn.encoded.ids[turn.start : turn.end]

    def plain_text(self, text: str) -> Rendered:
        """A text as the tokenizer begins it (with bos where it does so), eos at its end, everything supervised."""
        ids, eos = self._text_ids(text), self.tokenizer.eos_token_id
        if eos is not None and ids[-1:] != [eos]:
            ids.append(eos)
        return Rendered(ids, [True] * len(ids), [len(ids) - 1] if eos is not None else [])

    def _text_ids(self, text: str) -> list[int]:
        ids = self.tokenizer(text, verbose=False)["input_ids"]
        return ids[1:] if ids[:2] == [self.tokenizer.bos_token_id] * 2 else ids  # written out in the text too

    def _require_read(self, names: Iterable[str], hint: str) -> None:
        """Raise DataError for what the template does not know: it would be dropped without a word."""
        words = {name: READ_AS.get(name, re.escape(name)) for name in names}
        if unread := [name for name, word in words.items() if not re.search(rf"\b({word})\b", self._template)]:
            raise DataError(f"The model has no chat template that reads {', '.join(unread)}.", hint)

    def _begin(self, messages: list[Message], tools: Tools) -> list[Message]:
        self._tools, roles = tools or None, [message["role"] for message in messages[:2]]
        if roles in (["system", "user"], ["developer", "user"]) and not self._takes(roles[0]):
            text = "\n\n".join(message["content"] for message in messages[:2] if message["content"])
            return [messages[0] | messages[1] | {"content": text}, *messages[2:]]
        return messages

    def _takes(self, role: str) -> bool:
        """Whether the template writes a first message of this role; some refuse it, some leave it out. Said once."""
        if (key := (self._template, role)) not in self._taken:
            with suppress(DataError):
                self._taken[key] = PROBE in self._text([{"role": role, "content": PROBE}, QUESTION])
            if not self._taken.setdefault(key, False):
                line = "The chat template takes no %s message: its text is put at the start of the first user message."
                logging.getLogger(__name__).warning(line, role)
        return self._taken[key]

    def text(self, messages: list[Message]) -> str:
        """A whole conversation as the template writes it."""
        return self._text(self._begin(messages, None))

    def _text(self, messages: list[Message], generation_prompt: bool = False, tokenize: bool = False, **to: Any) -> Any:
        """What the template makes of a conversation. Raises DataError with the template's own complaint."""
        if not self._template:
            raise refusal("no_template")
        roles = [message["role"] for message in messages]
        hint = "Put the system text into the first user message." if "system" in roles else "Change the rows."
        seen = [{key: value for key, value in message.items() if key != "train"} for message in messages]
        to |= {"add_generation_prompt": generation_prompt, "tokenize": tokenize, "tools": self._tools}
        with Blame(DataError, f"The chat template refuses the roles {', '.join(roles)}", hint), _time_limit():
            return self.tokenizer.apply_chat_template(seen, **self.arguments, **to)

    def encode(self, text: str) -> Encoded:
        """Token ids of a rendered text. The template writes bos, or there is none: the tokenizer adds no token."""
        if text == self._whole[1]:
            return self._whole[2]
        if not self.tokenizer.is_fast:
            raise refusal("no_offsets", name=type(self.tokenizer).__name__)
        found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        if (ids := found["input_ids"])[:2] == [self.tokenizer.bos_token_id] * 2:
            raise refusal("bos_twice", bos=self.tokenizer.bos_token)
        return Encoded(ids, found["offset_mapping"])

    def _around(self, before: list[Message]) -> tuple[str, str]:
        """What the template writes before an answer where it ignores the generation prompt (else ""), and behind it."""
        if self._frame is None:
            prompt, through = self._text(before, True), self._text([*before, {"role": "assistant", "content": PROBE}])
            header, found, tail = through[len(_common(prompt, through)) :].rpartition(PROBE)
            if not found:
                raise refusal("no_answer", which="")
            self._frame = (header.strip() if header.strip() and prompt == self._text(before) else "", tail)
        return self._frame

    def _turn(self, messages: list[Message], place: int) -> Turn:
        """Where the assistant turn ``messages[place]`` lies: it begins where the generation prompt before it ends."""
        is_whole = messages is self._whole[0] and place + 1 == len(messages)
        through = self._whole[1] if is_whole else self._text(messages[: place + 1])
        prompt = self._text(messages[:place], True) if place else self._opening(through)
        header, tail = self._around(messages[:place] or [QUESTION])
        shared = _common(prompt, through)
        if self.loss_on != "all" and not self._has_markers and (header or shared != prompt):
            if header:
                raise refusal("no_generation_prompt", header=header)
            raise refusal("other_generation_prompt", ends=prompt[-30:], turn=through[len(shared) :][:30])
        encoded = self.encode(through)
        ids, start = encoded.ids, self._token_after(shared, encoded)
        stop = self._stop(encoded, start, len(through) - len(tail) if through.endswith(tail) else None)
        end = len(ids) if stop is None else stop + 1
        while stop is None and end > start and not self.tokenizer.decode(ids[end - 1]).strip():
            end -= 1  # whitespace that the template puts after the turn
        words, which = set(ids[start:end]) - self.special_ids, f" ({(messages[place].get('content') or '')[:30]!r})"
        if not words:
            raise refusal("no_answer", which=which)
        if words == {self.tokenizer.unk_token_id}:
            raise refusal("no_known_word", which=which, unk=self.tokenizer.unk_token)
        return Turn(place, encoded, start, end, stop)

    def _opening(self, through: str) -> str:
        """What stands before the answer in a conversation that begins with it: up to the generation prompt's text."""
        before, mark, _ = through.partition(self._text([QUESTION], True).removeprefix(self._text([QUESTION])) or "\0")
        if not mark.strip():
            raise refusal("no_opening")
        return before + mark

    def _token_after(self, prompt: str, encoded: Encoded) -> int:
        """The first token of the turn: after the prompt's own tokens, or the first that begins past its characters."""
        later = (i for i, (start, end) in enumerate(encoded.offsets) if start >= len(prompt) and end > start)
        place = next(later, len(encoded.ids))
        if place < len(encoded.ids) and encoded.offsets[place][0] == len(prompt):
            return place  # one begins just there: the usual case, and the prompt need not be encoded
        ids = self.encode(prompt).ids
        return len(ids) if encoded.ids[: len(ids)] == ids else place

    def _stop(self, encoded: Encoded, start: int, content_end: int | None) -> int | None:
        """The first special (else added) token behind the content; the last one where that end is not known."""
        (ids, offsets), after = encoded, -1 if content_end is None else content_end
        places = [i for i in range(start, len(ids)) if ids[i] in self.added_ids and offsets[i][1] > after]
        places = [i for i in places if ids[i] in self.special_ids] or places
        return places[-1 if content_end is None else 0] if places else None

    _has_markers = property(lambda self: GENERATION_MARKER.search(self.tokenizer.get_chat_template(tools=self._tools)))

    def _mark(self, encoded: Encoded, turns: list[Turn], messages: list[Message]) -> Rendered:
        """``encoded`` with its turns supervised: whole, or what is marked, and the end of turn just behind a marker."""
        ids, marked = encoded.ids, [True] * len(encoded.ids)
        if turns and self._has_markers:
            found = self._text(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
            marked = [bool(value) for value in found["assistant_masks"]]
        supervised, stops = [False] * len(ids), []
        for turn in turns:
            inside = [i for i in range(turn.start, turn.end) if marked[i]]
            behind = range(inside[-1] + 1 if inside else turn.end, turn.end)
            if inside and turn.stop is not None and not self.tokenizer.decode(ids[behind.start : turn.stop]).strip():
                inside += behind
                stops.append(turn.stop)
            for i in inside:
                supervised[i] = True
        if turns and not any(value and ids[i] not in self.special_ids for i, value in enumerate(supervised)):
            raise refusal("nothing_marked")
        return Rendered(ids, supervised, stops)

    def _everything(self, text: str, whole: Encoded, messages: list[Message], learned: list[bool]) -> list[bool]:
        """All tokens supervised but those of messages with ``train: false``, header and end of turn included."""
        supervised = [True] * len(whole.ids)
        for place in (i for i, value in enumerate(learned) if not value):
            before, through = self._text(messages[:place]) if place else "", self._text(messages[: place + 1])
            if not (text.startswith(through) and through.startswith(before)):
                raise refusal("rewrites_turns")
            start, end = self._token_after(before, whole), self._token_after(through, whole)
            supervised[start:end] = [False] * (end - start)
        return supervised


def _says_something(message: Message) -> bool:
    return bool((message.get("content") or "").strip() or message.get("tool_calls") or message.get("reasoning_content"))


def _common(first: str, second: str) -> str:
    return first if second.startswith(first) else commonprefix([first, second])  # noqa: RUF071 - by characters


@contextmanager
def _time_limit() -> Iterator[None]:
    """DataError after RENDER_SECONDS of processor time; no limit outside the main thread, where no signal arrives."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def refuse(number: int, frame: object) -> None:
        raise refusal("no_end", seconds=RENDER_SECONDS)

    before = signal.signal(signal.SIGVTALRM, refuse)
    signal.setitimer(signal.ITIMER_VIRTUAL, RENDER_SECONDS, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before or signal.SIG_DFL)
