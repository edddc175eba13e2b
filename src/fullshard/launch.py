"""Starts the ranks of a run here, or recognises a launcher that has started them (torchrun and the like)."""

import ctypes
import logging
import os
import platform
import shutil
import signal
import socket
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from pkgutil import resolve_name
from tempfile import TemporaryDirectory
from typing import Any
import psutil
import yaml
from fullshard import doctor, run_folder
from fullshard.checkpoint.format import newest_good, read_manifest
from fullshard.config import RunConfig, config_from_dict, load_config
from fullshard.errors import ERROR_TYPES, Blame, ConfigError, DataError, TrainError, UserError, read_refusals, refusal
from fullshard.run_folder import LAUNCH, claim_run, list_checkpoints, read_json, require_run, write_json

Recipe, Place, Count = RunConfig | str | Path, str | Path, int | None
MODES, PROBE_STEPS = ("loud", "quiet"), 4  # of a rank that trains; others: "trace", "doctor"
ASKED = "asked_model"  # in config.json, beside the recipe's keys: the model section as given
ASK_TO_STOP = signal.SIGUSR1  # from our launcher to its ranks, which SIGTERM ends at once


def speaks() -> bool:
    """Whether this process prints: under torchrun the first rank only."""
    return os.environ.get("RANK", "0") == "0"


def train_run(recipe: Recipe, overrides: Sequence[str] = (), ranks: int | None = None, quiet: bool = False) -> Any:
    """Train a recipe on ``ranks`` (default: all accelerators, else 2) in a new run folder: TrainResult or UserError."""
    if _started_by_launcher(ranks):
        return _train_here(recipe, overrides, quiet)
    config, text = _read_recipe(recipe, overrides)
    prepare_run(config, ranks, quiet, text, [])
    with claim_run(Path(config.output)):
        return _launch(Path(config.output), ranks, None, MODES[quiet])


def trace_run(
    recipe: Place, overrides: Sequence[str] = (), output: Place = "trace.html", ranks: Count = None, lang: str = "en"
) -> dict[str, Any]:
    """Run one step of a recipe on ranks of its own, always on the simple engine, and draw it: ``output`` (.html), .svg
    and .json beside it. Returns the last (see ``report.page``). Raises what train_run raises."""
    with _short_run(Path(output), recipe, [*overrides, "engine=simple"], ranks, "trace") as run:
        found = read_json(run / run_folder.TRACE)
    return resolve_name("fullshard.report.page:write_trace")({"recipe": str(recipe), **found}, Path(output), lang)


def probe_run(recipe: str | Path, overrides: Sequence[str] = (), ranks: int | None = None, **money: Any) -> Any:
    """The Plan of a recipe, its speed measured by PROBE_STEPS real steps. Raises what train_run raises."""
    from fullshard.planning import plan, search

    config, short = load_config(recipe, overrides), [*overrides, f"train.max_steps={PROBE_STEPS}"]
    with _short_run(Path(config.output), recipe, short, ranks, "quiet") as run:
        steps = [record for record in run_folder.read_metrics(run) if record["kind"] == "train"]
    speed = statistics.median(record["tokens_per_second"] for record in steps[1:] or steps)
    made, peak = search.make_plan(config, ranks, tokens_per_second=speed, **money), steps[-1]["memory_bytes"]
    measured = f"speed: measured in {len(steps)} steps, which took {plan.format_bytes(peak)} a rank"
    return replace(made, notes=(measured, *made.notes))


@contextmanager
def _short_run(beside: Path, recipe: str | Path, overrides: list[str], ranks: int | None, mode: str) -> Iterator[Path]:
    """Train on ranks of its own, without held-out rows, in a folder that goes unless something fails."""
    if _started_by_launcher(ranks):
        raise ConfigError("This starts its own ranks.", "Without torchrun: fullshard ... --ranks N")
    run = beside.absolute().with_name(f".{mode}_{os.urandom(6).hex()}")
    config, text = _read_recipe(recipe, [*overrides, "data.eval=null", f"output={run}"])
    prepare_run(config, ranks, True, text, [])
    _launch(run, ranks, None, mode)
    yield run
    shutil.rmtree(run)


def resume_run(run: Place, ranks: Count = None, step: Count = None, steps: Count = None, quiet: bool = False) -> Any:
    """Go on with a run from its newest (or the given) checkpoint, on any number of ranks; returns its TrainResult.
    ``steps``: train so many in all, instead of what the recipe means; the learning rate follows."""
    run = Path(run)
    if _started_by_launcher(ranks):
        here = resolve_name("fullshard.ranks:start_ranks")()
        find = partial(_step_to_resume, run, step, steps, _launchers(here))
        number = here.agree(find if here.is_first else None)[0]
        _require_shared(run, here)
        return _run_as_rank(run, number, MODES[quiet], here)
    number = _step_to_resume(run, step, steps)
    with claim_run(run):
        return _launch(run, ranks, number, MODES[quiet])


def check_machine(recipe: str | None = None, overrides: Sequence[str] = ()) -> doctor.MachineReport:
    """Test this machine, or under torchrun all nodes, and what a recipe needs where one is given; see ``doctor``.
    Nothing is installed or changed; what is wrong is a finding. Raises ConfigError for a recipe that is none."""
    config = load_config(recipe, overrides) if recipe else None
    output = Path(config.output if config else ".").absolute()
    place = next(folder for folder in (output, *output.parents) if folder.is_dir())
    checks = doctor.check_process(place)
    if checks[-1].name != "cache":  # torch cannot be used
        return doctor.MachineReport(tuple(checks))
    from fullshard.device import default_ranks

    needs = partial(doctor.check_recipe, config, place) if config else lambda num_ranks: []
    try:
        if _started_by_launcher():
            ranks = resolve_name("fullshard.ranks:start_ranks")(doctor.LIMIT_SECONDS)
            found = ranks.gather_objects((socket.gethostname(), [*checks, *doctor.examine_rank(ranks, place)]))
            needed = ranks.agree(partial(needs, ranks.num_ranks) if ranks.is_first else None)[0]
            return doctor.MachineReport((*doctor.join_ranks(found), *needed))
        with TemporaryDirectory() as folder:
            write_json(Path(folder) / doctor.FILE, {"place": str(place)})
            _launch(Path(folder), default_ranks(), None, "doctor")
            checks += [doctor.Check(**one) for one in read_json(Path(folder) / doctor.FILE)["found"]]
    except (RuntimeError, UserError) as error:  # RuntimeError: of a process group
        checks.append(doctor.judge("ranks", "fail", str(error).strip().partition("\n")[0]))
    return doctor.MachineReport((*checks, *(needs(default_ranks()) if not _started_by_launcher() else ())))


def _step_to_resume(run: Path, step: int | None, steps: int | None, launchers: Sequence[str] = ()) -> int:
    """``launchers``: torchrun's. Its elastic restart goes on from what this launch, begun at ``step``, has saved."""
    launch = read_json(require_run(run) / LAUNCH, optional=True)
    there = {str(one): folder.stat().st_mtime_ns for one, folder in list_checkpoints(run) if one != step}
    restarts = "found" in launch and not set(launchers).isdisjoint(launch["launchers"])
    others = [int(one) for one, stamp in there.items() if stamp == launch["found"].get(one)] if restarts else ()
    number, folder, problems = newest_good(run, None if restarts else step, others)
    for problem in problems:
        print(f"left out: {problem}", flush=True)
    if launchers and step is not None and not restarts:
        with claim_run(run):
            write_json(run / LAUNCH, {"launchers": launchers, "found": there})
    if number >= (steps or read_manifest(folder).trainer["num_steps"]):
        raise refusal("finished", run=run, step=number)
    if steps:
        with claim_run(run):
            values = read_json(run / run_folder.CONFIG)
            values["train"] |= {"max_steps": steps, "epochs": 10_000}
            write_json(run / run_folder.CONFIG, values)
            write_json(run / run_folder.PLAN, read_json(run / run_folder.PLAN) | {"steps_may_change": True})
    return number


def _started_by_launcher(ranks: int | None = None) -> bool:
    """Whether torchrun or the like started this process; refuses ``ranks`` that it, or this machine, cannot give."""
    started = os.environ.get("WORLD_SIZE") if "RANK" in os.environ else None
    if started and ranks not in (None, int(started)):
        raise ConfigError(f"--ranks {ranks}, but {started} ranks are started here.", "Leave --ranks out here.")
    if started or ranks is None:
        return bool(started)
    if ranks < 1:
        raise ConfigError(f"--ranks {ranks}: at least 1 is needed.", "Leave it out for this machine's default.")
    if 0 < (most := resolve_name("fullshard.device:num_devices")()) < ranks:
        raise ConfigError(f"--ranks {ranks}: this machine has {most} accelerators.", f"At most: --ranks {most}")
    return False


def prepare_run(config: RunConfig, ranks: int | None, quiet: bool, recipe_text: str, launchers: list[str]) -> None:
    """Make the run folder with recipe, config, prepared data and, last, plan; on any error nothing is left behind."""
    from torch import __version__ as torch_version
    from fullshard.data.prepared import partial_folder, prepare, rows_bar, write_held_out
    from fullshard.device import device_kind, num_cores, num_devices
    from fullshard.model import fetch, load, weight_map
    from fullshard.planning import plan, search
    from fullshard.train.loss import find_router_loss

    run = Path(config.output)
    unfinished = partial_folder(run / run_folder.PREPARED)  # goes on where it was interrupted
    left = {path.name for path in run.iterdir()} if run.is_dir() else {"a file"} if run.exists() else set()
    again = LAUNCH in left and not (list_checkpoints(run) or left & {run_folder.RESULT, run_folder.MERGED})
    if left - {unfinished.name} and not again:  # a start that never saved has nothing to lose
        go_on = f"Go on with it: fullshard resume {run}  Or: " if list_checkpoints(run) else "Choose another: "
        raise ConfigError(f"The output folder {run} exists already.", f"{go_on}output=ANOTHER_FOLDER")
    asked, config = config.model, fetch.with_model_folder(config)
    folder = Path(config.model.path)
    if folder.parent.name == "snapshots" and not asked.revision:  # huggingface_hub's cache: the folder is the commit
        asked = asked.model_copy(update={"revision": folder.name})
    model = load.build_on_meta(folder)
    weight_map.WeightMap(model, load.WeightFiles(folder), str(folder))
    if config.train.router_loss:
        find_router_loss(model)
    with Blame(ConfigError, f"The output folder {run} cannot be written", "Set output=FOLDER"):
        run.mkdir(parents=True, exist_ok=True)
        lock = claim_run(run, "trained" if run_folder.PLAN in left else "prepared")
        anew = [run_folder.clear_start(run)] if again else []
        (run / run_folder.RECIPE).write_text(recipe_text, encoding="utf-8")
    try:
        write_json(run / LAUNCH, {"launchers": launchers})
        unused = {"lora"} if config.method == "full" else set()  # a full recipe may not have the section
        values = config.model_dump(mode="json", exclude=unused) | {ASKED: asked.model_dump(mode="json")}
        values["model"]["path"] = str(folder.resolve())
        write_json(run / run_folder.CONFIG, values)
        packages = {name: version(name) for name in ("fullshard", "torch", "transformers", "peft", "safetensors")}
        facts = {"python": platform.python_version(), "machine": platform.machine(), "packages": packages}
        facts |= {"torch_build": torch_version, "device": device_kind(), "devices": num_devices(), "cores": num_cores()}
        write_json(run / run_folder.ENVIRONMENT, facts)
        with rows_bar(quiet) as progress:
            account = prepare(config, run / run_folder.PREPARED, progress)
        if isinstance(config.data.eval, float):
            write_held_out(config, run / run_folder.HELD_OUT)
        write_json(run / run_folder.DATA, account)
        write_json(run / run_folder.PLAN, asdict(made := search.make_plan(config, ranks)))
    except BaseException:
        None if again else run_folder.clear(run, unfinished)
        raise
    finally:
        lock.close()
    if not quiet:
        fetched = [f"model: {asked.path} is {folder}"] if asked.path != config.model.path else []
        notes = load.mended(read_json(folder / load.GENERATION_CONFIG, optional=True))[1]  # what a merge will change
        print("\n".join([*anew, *fetched, *notes, *account["report"], plan.render("summary.txt", **vars(made))]))


def _read_recipe(recipe: Recipe, overrides: Sequence[str]) -> tuple[RunConfig, str]:
    """The config and its text: as given, comments and all; a RunConfig, or with overrides, as the keys that are set."""
    config = recipe if isinstance(recipe, RunConfig) else load_config(recipe, overrides)
    if config is not recipe and not overrides:
        return config, Path(recipe).read_text(encoding="utf-8")
    values = config.model_dump(mode="json", exclude_unset=True)
    return config, yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def _launch(run: Path, ranks: int | None, resume_step: int | None, mode: str) -> Any:
    """Start the ranks through torch's elastic launcher and wait: the TrainResult, or the first failure raised."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    shutil.rmtree(run / run_folder.ERRORS, ignore_errors=True)
    ranks = ranks or int(read_json(run / run_folder.PLAN)["ranks"])
    asked: list[int] = []

    def unheard(number: int) -> UserError:
        command = f"resume {run}" if list_checkpoints(run) else f"train {run / run_folder.RECIPE}"
        found, found.exit_code = refusal("ended_from_outside", signal=number, command=command), 128 + number
        return found

    def ask(number: int, frame: Any) -> None:
        children = [child for child in psutil.Process().children() if "fullshard.launch" in child.cmdline()]
        if asked or not children:
            raise KeyboardInterrupt if asked else unheard(number)
        asked.append(number)
        print("finishing the step and saving; Ctrl-C again ends at once", file=sys.stderr, flush=True)
        for child in children:
            child.send_signal(ASK_TO_STOP)

    meeting = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "signals_to_handle": "SIGHUP", "max_restarts": 0}
    start = elastic_launch(LaunchConfig(1, 1, nproc_per_node=ranks, run_id=run.name, **meeting), sys.executable)
    sys.stdout.flush()
    in_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT) if in_main}
    try:
        start("-m", "fullshard.launch", str(run), str(resume_step or 0), mode, str(os.getpid()))
    except ChildFailedError as error:
        is_unheard = asked and not any((run / run_folder.ERRORS).glob("*.json"))  # asked before it could listen
        failure = unheard(asked[0]) if is_unheard else _first_failure(run, error)
        failure.exit_code = 128 + asked[0] if asked else failure.exit_code
        raise failure from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    shutil.rmtree(run / run_folder.ERRORS, ignore_errors=True)
    return resolve_name("fullshard.train.loop:TrainResult").read(run) if mode in MODES else None


def _first_failure(run: Path, error: Any) -> UserError:
    """A problem that a rank named, not that it lost one; else a rank ended by a signal; else the first exception."""
    records = sorted(map(read_json, (run / run_folder.ERRORS).glob("rank_*.json")), key=lambda record: record["time"])
    lost = read_refusals()["rank_lost"][1][0].partition(":")[0]
    killed = [one for one in error.failures.items() if one[1].exitcode < 0 and one[1].exitcode != -signal.SIGTERM]
    for record in records:
        if record["type"] in ERROR_TYPES and not (killed and record["message"].startswith(lost)):
            found = ERROR_TYPES[record["type"]](record["message"], record["hint"])
            found.exit_code = record["exit_code"]
            return found
    stacks = sorted((run / run_folder.ERRORS).glob("*.stacks"))
    if hung := [path.stem for path in stacks if path.read_text().startswith("Timeout")]:
        return refusal("hung", ranks=", ".join(hung), folder=run / run_folder.ERRORS, run=run)
    plan_it = f"fullshard plan {run / run_folder.RECIPE}"
    if killed:
        rank, number = min((rank, -failure.exitcode) for rank, failure in killed)
        often = " (often: out of memory)" * (number == 9)
        return refusal("ended_by_signal", rank=rank, signal=number, often=often, plan_it=plan_it)
    if records:
        rank, kind, message = (records[0][key] for key in ("rank", "type", "message"))
        if kind == "OutOfMemoryError":
            return refusal("out_of_memory", rank=rank, message=message, plan_it=plan_it)
        return refusal("rank_raised", rank=rank, kind=kind, message=message, folder=run / run_folder.ERRORS)
    rank, failure = min(error.failures.items(), key=lambda item: item[1].timestamp)
    return TrainError(f"Rank {rank} ended with exit code {failure.exitcode}, see above.", f"fullshard resume {run}")


def _train_here(recipe: Recipe, overrides: Sequence[str], quiet: bool) -> Any:
    """Under torchrun: rank 0 prepares, all train. An elastic restart (same launcher) goes on in the run folder."""
    from fullshard.model.fetch import with_model_folder

    ranks = resolve_name("fullshard.ranks:start_ranks")()
    config, text = ranks.agree(partial(_read_recipe, recipe, overrides))[ranks.rank]
    ranks.agree(partial(with_model_folder, config) if ranks.local_rank == 0 else None)  # a download once a node
    run, launchers = Path(config.output), _launchers(ranks)

    def prepare() -> None:
        again = set(read_json(run / LAUNCH, optional=True).get("launchers", [])) & set(launchers)
        if not (again and (run / run_folder.PLAN).is_file()):  # else an elastic restart goes on there
            prepare_run(config, ranks.num_ranks, quiet, text, launchers)

    _require_shared(run, ranks)
    ranks.agree(prepare if ranks.is_first else None)
    _require_same_data(run / run_folder.PREPARED, ranks)
    return _run_as_rank(run, None, MODES[quiet], ranks)


def _launchers(ranks: Any) -> list[str]:
    """Host, process and start of each launcher of ``ranks``, the start in ticks that no step of the clock moves."""
    stat = Path(f"/proc/{(pid := os.getppid() or os.getpid())}/stat")  # proc_pid_stat(5), 22; names may hold spaces
    start = stat.read_text().rpartition(")")[2].split()[19] if stat.is_file() else psutil.Process(pid).create_time()
    return sorted(set(ranks.gather_objects(f"{socket.gethostname()} {pid} {start}")))


def _require_same_data(prepared: Path, ranks: Any) -> None:
    hashes = ranks.agree(lambda: (read_json(prepared / run_folder.DATA)["hash"][:12], socket.gethostname()))
    if len(dict(hashes)) > 1:
        found = ", ".join(f"{content} on {node}" for content, node in sorted(set(hashes)))
        ranks.refuse(DataError(f"{prepared} differs between nodes: {found}.", "Train anew: output=NEW_FOLDER"))


def _require_shared(run: Path, ranks: Any) -> None:
    """ConfigError on all ranks where one of them does not see, at its own ``run``, the token that rank 0 puts there."""
    places = ranks.who_sees(run)
    blind = sorted({place for place, seen in places if not seen})
    if ranks.is_first and blind and not any(run.iterdir()):
        run.rmdir()
    if blind:
        ranks.refuse(refusal("not_shared", place=places[0][0], blind=", ".join(blind)))


def _run_as_rank(run: Path, resume_step: int | None, mode: str, ranks: Any = None) -> Any:
    """Be one of ``Ranks``: join the group, train, leave. Rank 0's view of the newest checkpoint is everyone's."""
    from fullshard.model.fetch import with_model_folder
    from fullshard.ranks import start_ranks, stop_ranks
    from fullshard.train.loop import TrainResult, run_rank, trace_rank

    signals = (signal.SIGTERM, signal.SIGINT) if ranks else (ASK_TO_STOP,)  # of torchrun, or of our launcher
    lock = claim_run(run) if ranks and ranks.is_first else nullcontext()  # our launcher holds it for its ranks
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str((run / run_folder.ERRORS).resolve() / "collectives_rank_"))
    ranks = ranks or start_ranks()
    if resume_step is None:
        found = ranks.agree(partial(newest_good, run) if ranks.is_first and list_checkpoints(run) else None)[0]
        resume_step = found[0] if found else 0
    values = read_json(run / run_folder.CONFIG)
    asked = values.pop(ASKED, values["model"])
    if not Path(values["model"]["path"]).is_dir():  # another node's cache may lie elsewhere
        values["model"] = asked
    config = config_from_dict(values, str(run / run_folder.CONFIG))
    ranks.agree(partial(with_model_folder, config) if ranks.local_rank == 0 else None)  # a download once a node
    config = with_model_folder(config)
    what = run, config, read_json(run / run_folder.PLAN), ranks
    with lock:
        trace_rank(*what) if mode == "trace" else run_rank(*what, resume_step or None, mode == "quiet", signals)
    stop_ranks()  # only after success: on a failure it could wait for peers that are gone
    return TrainResult.read(run) if mode != "trace" else None


def rank_main(arguments: list[str]) -> int:
    """Entry of a rank that our launcher starts: RUN RESUME_STEP MODE PID. Writes errors/rank_N.json on failure."""
    run, resume_step, mode = Path(arguments[0]), int(arguments[1]), arguments[2]
    if sys.platform == "linux":  # end when the launcher dies, however it dies
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, prctl(2)
    if os.getppid() != int(arguments[3]):  # it has died before
        return 1
    try:
        doctor.run_rank(run) if mode == "doctor" else _run_as_rank(run, resume_step, mode)
        return 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # the rank's outermost frame: every failure must reach the launcher
        rank, known = int(os.environ.get("RANK", "0")), error if isinstance(error, UserError) else UserError(str(error))
        code = known.exit_code if known is error else 1  # as the command line's
        message = "; ".join([known.message, *getattr(error, "__notes__", [])])
        record = {"rank": rank, "type": type(error).__name__, "message": message, "hint": known.hint}
        record |= {"exit_code": code, "time": time.monotonic(), "traceback": traceback.format_exc()}
        try:
            (run / run_folder.ERRORS).mkdir(exist_ok=True)
            write_json(run / run_folder.ERRORS / f"rank_{rank}.json", record)
        except OSError:  # of a full disk, say
            print(f"Rank {rank}: {message}. Go on: fullshard resume {run}", file=sys.stderr)
        return code


if __name__ == "__main__":
    code = rank_main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # at a usual exit gloo's threads may abort what has succeeded
