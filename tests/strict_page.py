"""A strict reader of the HTML pages: what a browser would forgive fails here."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "rect", "line"}


class StrictParser(HTMLParser):
    """Raises where tags do not nest; collects tags, attributes and text."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.attributes, self.texts = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        assert tag in VOID, tag
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        if tag in VOID:  # Chromium writes </line>
            return
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))


def parse(document: str) -> StrictParser:
    """Parse a whole page strictly: tags nest, and nothing in it can run or be loaded."""
    assert document.startswith("<!DOCTYPE html>")
    parser = StrictParser()
    parser.feed(document)
    parser.close()
    assert not parser.open, parser.open
    assert not {"script", "link", "img", "iframe", "object", "base", "form", "a"} & set(parser.tags)
    names = {name for name, _ in parser.attributes}
    assert not {"src", "href", "srcset", "action", "style"} & names and not [n for n in names if n.startswith("on")]
    style = "".join(data for tag, data in parser.texts if tag == "style")
    assert "url(" not in style and "@import" not in style
    return parser
