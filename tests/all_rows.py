"""All rows of files at once, with their account."""

from dataclasses import dataclass, field

from fullshard.config import DataSection
from fullshard.data.sources import Account, Row, iterate_rows


@dataclass
class Source(Account):
    rows: list[Row] = field(default_factory=list)


def read_source(paths, data: DataSection, seed: int = 0) -> Source:
    source = Source()
    source.rows = list(iterate_rows(paths, data, seed, source))
    return source
