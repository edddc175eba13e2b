"""Kill, damage, resume: a run must lose nothing but the steps since its last checkpoint.

    python benchmarks/soak.py [--kills 100] [--damages 500] [--folder FOLDER] [--seed 0]

Runs of a tiny model (full and LoRA, both engines, 2 to 4 ranks) save every 3 of 50 steps and are killed with signal 9,
one rank, all, or their launcher: two of three kills at a random moment, the third while a save is seen to go on (what
a save had not finished is counted: ``in_a_save``). Every fourth resume takes another number of ranks: two of the four
in every second run. Each run is resumed until it ends; its losses must be those of the uninterrupted run: bit for bit
up to the checkpoint from which it first went on at another number of ranks, within 1e-5 behind it. All ranks must be
gone within 30 s of a kill, each resume must start, and no process may be left in the job's folder. Damages: one byte
flipped, a file cut or removed, over all files of checkpoints; `fullshard verify` must name the file. With --folder what
is done is kept (soak.jsonl) and not done again. Written to benchmarks/results/soak_HARDWARE_DATE.json, unless there are
few kills.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import yaml
from measuring import ENVIRONMENT, hardware, write

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
STEPS, KILLS_A_RUN = 50, 4
FULL_KILLS = 20  # fewer are a look, which leaves no result
ENDED = "ended before"  # nothing was left to kill
FULLSHARD = [sys.executable, "-m", "fullshard"]


def make(folder: Path, engine: str, method: str) -> Path:
    """A job of STEPS steps with a checkpoint every third."""
    from tiny_models import make_job

    job = make_job(folder, 24)
    recipe = yaml.safe_load((job / "recipe.yaml").read_text())
    recipe |= {"engine": engine, "method": method}
    recipe["train"] |= {"save_every": 3, "epochs": 100, "max_steps": STEPS, "keep_last": 3}
    (job / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return job


def losses(run: Path) -> dict[int, float]:
    """The last recorded loss of each step."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return {record["step"]: record["loss"] for record in records if record["kind"] == "train"}


def call(job: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*FULLSHARD, *arguments], cwd=job, env=ENVIRONMENT, capture_output=True, text=True)


def alive(job: Path) -> list[psutil.Process]:
    """Processes that work in this folder: ranks, launchers, and whatever they have started."""
    found = []
    for process in psutil.process_iter(["cwd", "status"]):
        if process.info["cwd"] == str(job) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def saving(job: Path, since: float) -> bool:
    """Whether a save that began after ``since`` goes on, or was cut short by a kill."""
    for folder in (job / "run" / "checkpoints").glob(".step_*.tmp"):
        with suppress(FileNotFoundError):  # it has just got its name
            if folder.stat().st_mtime > since:
                return True
    return False


def kill_one(job: Path, command: list[str], draw: random.Random) -> dict[str, Any]:
    """Start ``command``, kill a rank or all at a random moment after a random step, or in a save; what was killed."""
    metrics = job / "run" / "metrics.jsonl"
    before = len(metrics.read_bytes().splitlines()) if metrics.is_file() else 0
    started = time.time()
    process = subprocess.Popen(
        [*FULLSHARD, *command], cwd=job, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    wanted, aims_at_save = before + draw.randrange(1, 12), draw.random() < 1 / 3
    while process.poll() is None and (not metrics.is_file() or len(metrics.read_bytes().splitlines()) < wanted):
        time.sleep(0.002)
    while aims_at_save and process.poll() is None and not saving(job, started):
        time.sleep(0.0005)
    time.sleep(draw.random() * (0.004 if aims_at_save else 0.02))  # the moment inside a step or a save
    ranks = []
    with suppress(psutil.Error):  # it ends at this moment
        if process.poll() is None:
            children = psutil.Process(process.pid).children()
            ranks = [one for one in children if "fullshard.launch" in one.cmdline()]
    kind = draw.choice(["rank", "rank", "ranks", "launcher"])
    victims = {"rank": draw.sample(ranks, min(1, len(ranks))), "ranks": ranks, "launcher": []}[kind]
    killed = time.monotonic()
    for victim in victims:
        if victim.is_running():
            victim.send_signal(signal.SIGKILL)
    if kind == "launcher" and ranks and process.poll() is None:
        process.kill()
    errors = process.communicate(timeout=120)[1]
    _, left = psutil.wait_procs(ranks, timeout=30)
    seconds, said = time.monotonic() - killed, errors.strip().splitlines()[:1]
    fine = not left and seconds <= 30 if ranks else process.returncode == 0 or "is finished" in errors
    cut = bool(ranks) and saving(job, started)
    return {"kind": kind if ranks else ENDED, "in_a_save": cut, "seconds": round(seconds, 2),
            "left": len(left), "said": said, "fine": fine}  # fmt: skip


def soak(job: Path, straight: dict[int, float], number: int, ranks: int, draw: random.Random) -> dict[str, Any]:
    """One run: killed at random KILLS_A_RUN times, resumed after each, at last to its end; what was found."""
    shutil.rmtree(job / "run", ignore_errors=True)
    kills, command = [], ["train", "recipe.yaml", "--ranks", str(ranks)]
    changes_ranks = (number + number // 4) % 2  # each engine and method in turn
    others = draw.sample(range(KILLS_A_RUN), KILLS_A_RUN // 2 if changes_ranks else 0)  # these resumes
    same_until, resumed_on = STEPS, []
    for index in range(KILLS_A_RUN):
        kills.append(kill_one(job, command, draw))
        found = sorted((job / "run" / "checkpoints").glob("step_*"))
        if not found:  # the same command starts anew in the same folder
            (job / "run" / "metrics.jsonl").unlink(missing_ok=True)
            continue
        now = draw.choice([n for n in (1, 2, 3, 4) if n != ranks]) if index in others else ranks
        if now != ranks:
            same_until = min(same_until, int(found[-1].name.removeprefix("step_")))
        resumed_on.append(now)
        command = ["resume", "run", "--ranks", str(now)]
    done = call(job, *command)
    finished = done.returncode == 0 or "is finished" in done.stderr
    losses_now = losses(job / "run") if (job / "run" / "metrics.jsonl").is_file() else {}
    off = {step: abs(losses_now.get(step, 1e9) / loss - 1) for step, loss in straight.items()}
    worst_same = max((off[step] for step in off if step <= same_until), default=0.0)
    left = [" ".join(one.cmdline())[:200] for one in alive(job)]
    fine = finished and len(off) == STEPS and worst_same == 0 and max(off.values()) <= 1e-5 and not left
    fine = fine and all(kill["fine"] for kill in kills)
    return {
        "number": number, "ranks": ranks, "resumed_on": resumed_on, "others": any(now != ranks for now in resumed_on),
        "kills": kills, "worst": max(off.values(), default=1e9), "worst_same": worst_same, "left": left, "fine": fine,
        "said": "" if fine else done.stderr[-500:],
    }  # fmt: skip


def damage(job: Path, number: int, draw: random.Random) -> dict[str, Any]:
    """Flip a byte of, cut or remove one file of a checkpoint; is it named? The file is put back."""
    folder = draw.choice(sorted((job / "run" / "checkpoints").glob("step_*")))
    path = draw.choice(sorted(folder.iterdir()))
    content, kind = path.read_bytes(), draw.choice(["flip", "cut", "remove"])
    place = draw.randrange(len(content))
    if kind == "remove":
        path.unlink()
    else:
        flipped = content[:place] + bytes([content[place] ^ draw.randrange(1, 256)]) + content[place + 1 :]
        path.write_bytes(flipped if kind == "flip" else content[:place])
    from fullshard.checkpoint.format import verify

    ((_, problem),) = verify(folder).found
    path.write_bytes(content)
    return {"number": number, "damage": kind, "file": path.name, "fine": path.name in problem, "said": problem[:200]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--damages", type=int, default=500)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    place = (options.folder or Path(tempfile.mkdtemp(prefix="soak_"))).resolve()  # as processes name their folder
    place.mkdir(exist_ok=True)
    book = place / "soak.jsonl"
    done = [json.loads(line) for line in book.read_text().splitlines()] if book.is_file() else []
    known = {(record["number"], "kills" in record) for record in done}
    started = time.perf_counter()

    def keep(record: dict[str, Any]) -> None:
        done.append(record)
        with open(book, "a") as file:
            file.write(json.dumps(record) + "\n")
        if not record["fine"]:
            print("NOT FINE", json.dumps(record), flush=True)

    kinds = [("simple", "full"), ("torch", "lora"), ("torch", "full"), ("simple", "lora")]
    straight: dict[tuple[str, str, int], dict[int, float]] = {}
    number = -1
    while sum(kill["kind"] != ENDED for record in done for kill in record.get("kills", ())) < options.kills:
        number += 1
        if (number, True) in known:
            continue
        engine, method = kinds[number % len(kinds)]
        ranks, job = 2 + number // len(kinds) % 3, place / f"{engine}_{method}"
        if not (job / "recipe.yaml").is_file():
            job.mkdir()
            make(job, engine, method)
        if (engine, method, ranks) not in straight:
            shutil.rmtree(job / "run", ignore_errors=True)
            first = call(job, "train", "recipe.yaml", "--ranks", str(ranks))
            assert first.returncode == 0, first.stderr
            straight[engine, method, ranks] = losses(job / "run")
        keep(soak(job, straight[engine, method, ranks], number, ranks, random.Random(f"{options.seed} {number}")))
    jobs = sorted(folder.parents[1] for folder in place.glob("*/run/checkpoints"))
    for number in range(options.damages):
        if (number, False) not in known:
            keep(damage(jobs[number % len(jobs)], number, random.Random(f"{options.seed} damage {number}")))
    runs, damages = ([record for record in done if ("kills" in record) == wanted] for wanted in (True, False))
    kills = [kill for record in runs for kill in record["kills"] if kill["kind"] != ENDED]
    table = {
        "runs": len(runs), "runs_fine": sum(record["fine"] for record in runs), "kills": len(kills),
        "kills_by_kind": {kind: sum(kill["kind"] == kind for kill in kills) for kind in ("rank", "ranks", "launcher")},
        "kills_in_a_save": sum(kill["in_a_save"] for kill in kills),
        "slowest_end_seconds": max((kill["seconds"] for kill in kills), default=0.0),
        "resumes": sum(len(record["resumed_on"]) for record in runs),
        "resumes_on_other_ranks": sum(n != record["ranks"] for record in runs for n in record["resumed_on"]),
        "processes_left": sum(len(record["left"]) + sum(k["left"] for k in record["kills"]) for record in runs),
        "worst_on_other_ranks": max((record["worst"] for record in runs if record["others"]), default=None),
        "damages": len(damages), "damages_named": sum(record["fine"] for record in damages),
        "seconds": round(time.perf_counter() - started), "not_fine": [r for r in done if not r["fine"]],
    }  # fmt: skip
    command = f"python benchmarks/soak.py --kills {options.kills} --damages {options.damages} --seed {options.seed}"
    print(json.dumps(table, indent=2))
    if options.kills >= FULL_KILLS:
        write("soak", command, {**hardware(), **table}, ("torch", "safetensors"))
    if not options.folder:
        shutil.rmtree(place)
    sys.exit(bool(table["not_fine"]))


if __name__ == "__main__":
    main()
