"""What became of every row: counts, reasons, and the lines that say so."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from fullshard.errors import DataError

NO_SUPERVISED = "no supervised token"
TOO_LONG = "longer than max_length"
SHOWN = 3  # rows named in a message


@dataclass
class Audit:
    """Row accounting of one split. A source row is used or dropped; the tokens of all add up."""

    split: str
    shape: str
    max_length: int
    rows: int = 0  # source rows read
    used: int = 0  # source rows of which at least one training row is kept
    prepared: int = 0  # training rows written; more than used where a template needs a row per answer
    dropped: dict[str, list[str]] = field(default_factory=dict)  # reason -> origins
    partly: list[str] = field(default_factory=list)  # origins of used rows that lost one of their training rows
    cut: list[str] = field(default_factory=list)  # origins
    tokens: int = 0
    supervised: int = 0  # supervised positions
    targets: int = 0  # supervised positions that can be predicted (all but a row's first)
    tokens_dropped: int = 0
    tokens_cut: int = 0
    longest: int = 0  # tokens of the longest row before cutting or dropping
    longest_origin: str = ""
    longest_written: int = 0  # and after
    stops: Counter[int] = field(default_factory=Counter)  # supervised end-of-turn ids

    def drop(self, origin: str, reason: str) -> None:
        """Count a dropped source row."""
        self.dropped.setdefault(reason, []).append(origin)

    def to_json(self) -> dict[str, Any]:
        """The numbers, for data.json."""
        return {
            "shape": self.shape,
            "rows": self.rows,
            "used": self.used,
            "prepared": self.prepared,
            "dropped": {reason: len(origins) for reason, origins in self.dropped.items()},
            "partly": len(self.partly),
            "cut": len(self.cut),
            "tokens": self.tokens,
            "supervised_tokens": self.supervised,
            "targets": self.targets,
            "tokens_dropped": self.tokens_dropped,
            "tokens_cut": self.tokens_cut,
            "longest": self.longest,
            "longest_origin": self.longest_origin,
            "longest_written": self.longest_written,
            "stop_tokens": sum(self.stops.values()),
            "stop_ids": [number for number, _ in self.stops.most_common()],
        }

    def report(self, tokenizer: Any) -> list[str]:
        """The lines that a person reads."""
        share = 100 * self.supervised / max(1, self.tokens)
        names = ", ".join(tokenizer.convert_ids_to_tokens(number) for number, _ in self.stops.most_common())
        lines = [
            f"{self.split} ({self.shape}): {self.rows:,} rows: {self.used:,} used; {self.tokens:,} tokens,"
            f" {self.supervised:,} supervised ({share:.0f}%), longest row {self.longest:,} of {self.max_length:,}",
            f"{self.split}: supervised stop tokens: {sum(self.stops.values()):,}" + (f" ({names})" if names else ""),
        ]
        if not self.stops:
            lines[-1] += "; the model does not learn where to stop, because the rows end in no special token"
        for reason, origins in self.dropped.items():
            lines.append(f"{self.split}: {len(origins):,} of {self.rows:,} dropped: {reason} ({_some(origins)})")
        if self.partly:
            lines.append(
                f"{self.split}: {len(self.partly):,} used rows lost an answer: too long ({_some(self.partly)})"
            )
        if self.cut:
            lines.append(
                f"{self.split}: {len(self.cut):,} of {self.rows:,} cut at {self.max_length} tokens ({_some(self.cut)})"
            )
        if self.tokens_dropped or self.tokens_cut:
            total = self.tokens + self.tokens_dropped + self.tokens_cut
            lines.append(
                f"{self.split}: {total:,} tokens in = {self.tokens:,} used + {self.tokens_dropped:,} dropped"
                f" + {self.tokens_cut:,} cut"
            )
        if self.prepared > self.used:
            lines.append(
                f"{self.split}: {self.used:,} rows became {self.prepared:,}, one per answer, because the chat template"
                " rewrites earlier turns"
            )
        return lines


def refuse_too_long(origins: list[str], longest: int, max_length: int) -> DataError:
    """The error for rows over ``max_length`` under the policy "stop"; ``longest`` is the longest such row."""
    rows = "1 row is" if len(origins) == 1 else f"{len(origins):,} rows are"
    return DataError(
        f"{rows} longer than data.max_length ({max_length} tokens): {_some(origins)}; the longest has {longest}.",
        f"Set data.max_length={longest}, or data.too_long=drop to leave such rows out, or data.too_long=cut.",
    )


def refuse_unsupervised(origin: str, length: int, before: int | None, max_length: int, more: int) -> DataError:
    """The error for a row without supervised tokens. ``before``: tokens before its first one, None if it has none.

    ``more``: how many further rows have the same trouble.
    """
    others = f" {more:,} more rows are like it." if more > 1 else " 1 more row is like it." if more else ""
    if before is None:
        return DataError(
            f"{origin}: none of {length} tokens is supervised: the row has no answer, or an empty one.{others}",
            "Repair the row, or set data.too_long=drop to leave such rows out.",
        )
    return DataError(
        f"{origin}: {before} tokens come before the first supervised one, but data.max_length is {max_length}:"
        f" nothing would be supervised.{others}",
        f"Set data.max_length={length} (the whole row), or data.too_long=drop to leave such rows out.",
    )


def _some(origins: list[str]) -> str:
    more = f" and {len(origins) - SHOWN:,} more" if len(origins) > SHOWN else ""
    return ", ".join(origins[:SHOWN]) + more
