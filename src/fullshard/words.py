"""Keys and verbs of other tools, answered with the names used here. The table, with its sources, is words.yaml."""

from fullshard.errors import read_table

TOOLS = {"L": "LLaMA-Factory", "S": "ms-swift", "A": "Axolotl", "T": "TRL"}


def answer_word(given: str, value: object = None) -> str | None:
    """What to write for another tool's verb or key (``a.key``, ``--key``, a section) and its value; None if unknown."""
    wanted = given.split(".")[-1].lstrip("-").replace("-", "_")
    for row in read_table("words.yaml"):
        for word, tools in row["words"].items():
            if word.replace("-", "_") == wanted:
                here = row.get("here", "") + _translated(row.get("values", ""), value)
                text = "; ".join(filter(None, (here, row.get("note"))))
                return f"{given} is a word of {', '.join(TOOLS[tool] for tool in tools)}; here: {text}"
    inner = value.items() if isinstance(value, dict) else ()
    return "\n  - ".join(filter(None, (answer_word(f"{given}.{name}", item) for name, item in inner))) or None


def _translated(values: str, value: object) -> str:
    """``: VALUE`` as the key here takes it; in brackets what it takes where it has no such value; else nothing."""
    if "=" in values:
        known = dict(pair.split("=") for pair in values.split())
        found = known.get(str(value).lower())
        return f": {found}" if found else f" ({' or '.join(dict.fromkeys(known.values()))})"
    if values == "list" and isinstance(value, str | list):
        names = value.replace(" ", "").split(",") if isinstance(value, str) else value
        return ": all-linear" if names[:1] in (["all"], ["all-linear"]) else f": [{', '.join(map(str, names))}]"
    kinds = {"text": str, "whole": int, "rows": int, "share": float, "number": int | float}
    if isinstance(value, bool) or not isinstance(value, kinds.get(values, ())) or (values == "share" and value >= 1):
        return ""
    return f": {value} rows" if values == "rows" else f": {value}"
