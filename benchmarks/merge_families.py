"""Zero differences: families x {full, LoRA, LoRA + new tokens, tied} x {our checkpoint, DCP}, merged, against memory.

    python benchmarks/merge_families.py [--families llama,gpt2] [--folder FOLDER]

Each tiny random model is trained for two steps on two ranks; tests/merge_cells.py says how it is saved, merged and
compared. Zero: every merged parameter bit-equal to float64's W + s B A rounded once to fp32 (full: to the trained
one), logits bit-equal (full) or within 1e-5 of their range of PEFT's unmerged forward (LoRA). Written to
benchmarks/results/merge_families_HARDWARE_DATE.json, unless --families names only some.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from measuring import hardware, write

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
LIMIT = 1e-5  # of the logits' range, where adapters were folded


def holds(kind: str, cell: dict[str, Any]) -> bool:
    """Whether a cell has no difference."""
    limit = LIMIT if "LoRA" in kind else 0.0
    return not cell.get("error") and not cell["parameters_differ"] and cell["logits"] <= limit and cell["moved"] > 0


def main() -> None:
    import merge_cells
    from rank_pool import pool
    from tiny_models import make_model, make_tokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", type=lambda text: tuple(text.split(",")), default=merge_cells.FAMILIES)
    parser.add_argument("--folder", type=Path, help="work here, and keep what is made")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    place = options.folder or Path(tempfile.mkdtemp(prefix="merge_families_"))
    words, ranks = make_tokenizer(make_model(place / "words")), pool(2)
    started, table, count = time.perf_counter(), {}, Counter()
    for family in options.families:
        for kind in merge_cells.KINDS:
            if family == merge_cells.LEFT_OUT[0] and merge_cells.LEFT_OUT[1] in kind:
                continue
            folder, cells = place / f"{family}_{kind.replace(', ', '_').replace(' ', '_')}", {}
            trained = None
            for source in merge_cells.sources_of(kind):
                try:
                    trained = trained or merge_cells.train(folder, family, kind, words, ranks)
                    cells[source] = merge_cells.compare(trained, source, folder / f"merged_{source.replace(', ', '_')}")
                except Exception as error:
                    traceback.print_exc()
                    cells[source] = {"error": f"{type(error).__name__}: {error}"}
                count["cells"] += 1
                count["zero"] += (good := holds(kind, cells[source]))
                print("zero " if good else "DIFFERS", family, kind, source, cells[source], flush=True)
            table.setdefault(family, {})[kind] = cells
            if not options.folder:
                shutil.rmtree(folder, ignore_errors=True)
    cells = [(kind, cell) for kinds in table.values() for kind, of in kinds.items() for cell in of.values()]
    of_lora = [cell.get("logits", 1.0) for kind, cell in cells if "LoRA" in kind]
    found = {**hardware(), "seconds": time.perf_counter() - started, "cells": count["cells"], "zero": count["zero"]}
    found |= {"largest_logit_difference_lora": max(of_lora), "limit": LIMIT, "table": table}
    print({key: value for key, value in found.items() if key != "table"})
    if options.families == merge_cells.FAMILIES:
        write("merge_families", "python benchmarks/merge_families.py", found, ("torch", "transformers", "peft"))
    if not options.folder:
        shutil.rmtree(place)
    sys.exit(count["cells"] != count["zero"])


if __name__ == "__main__":
    main()
