"""Memory and speed of merging a synthetic checkpoint, beside accelerate, torch and PEFT, and the disk's own copy rate.

    python benchmarks/merge.py [--gigabytes 8] [--repeats 3] [--folder FOLDER]

A llama of random weights, ``--gigabytes`` in fp32: saved by ``fully_shard`` on 4 ranks (DCP), in our format of 4 ranks,
and as a LoRA adapter on its bf16 base. Each merge runs in a process of its own and all take turns; files are dropped
from the page cache first. Memory: peak resident bytes over those right after the imports, of ours while it writes, with
its child processes (each over what its imports take), and while it proves. Writing and proof are timed apart. The copy:
the DCP files, read and written in blocks of 16 MB, with fsync. Needs about five times the size on disk, and the size
and a half in memory for the others. Written to benchmarks/results/merge_HARDWARE_DATE.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from measuring import hardware, spread, write

NUM_RANKS = 4
LAYER = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 4}


def build(layers: int) -> Any:
    """The model on meta."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(num_hidden_layers=layers, vocab_size=32_000, max_position_embeddings=2048, **LAYER)
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def values(name: str, size: int, first: int = 0) -> torch.Tensor:
    """Elements of a weight, the same wherever they are made: small, and different by place."""
    if "norm" in name:
        return torch.ones(size)
    place = torch.arange(first, first + size, dtype=torch.int64)
    return ((place * 2_654_435_761 + len(name)) % 65_521).float().div_(65_521).sub_(0.5).mul_(0.04)


def write_base(folder: Path, layers: int) -> None:
    """The base in bf16, a file a layer; another value than ``values`` everywhere but in norms."""
    from safetensors.torch import save_file

    model, index = build(layers), {}
    model.config.dtype = torch.bfloat16
    model.config.save_pretrained(folder)
    by_file: dict[str, dict[str, torch.Size]] = {}
    for name, parameter in model.named_parameters():
        found = re.search(r"layers\.(\d+)\.", name)
        by_file.setdefault(f"model-{found[1] if found else 'rest'}.safetensors", {})[name] = parameter.shape
    for file, tensors in by_file.items():
        made = {name: values(name, shape.numel()).mul(0.9).view(shape).bfloat16() for name, shape in tensors.items()}
        save_file(made, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def save_dcp(rank: int, folder: str, layers: int) -> None:
    """One of the ranks that save the checkpoint as FSDP2 does."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}.meeting", rank=rank, world_size=NUM_RANKS)
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    model = build(layers)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh).to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local, whole = parameter.to_local(), parameter.shape
            rows = -(-whole[0] // NUM_RANKS)
            first = min(rank * rows, whole[0]) * math.prod(whole[1:])
            local.copy_(values(name, local.numel(), first).view(local.shape))
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
    dist.destroy_process_group()


def write_run(run: Path, base: Path, adapter: Path | None = None) -> None:
    """A run folder of ours: all weights in four parts, or an adapter's."""
    from safetensors.torch import load_file, save_file

    from fullshard.checkpoint.format import FileFacts, Manifest, Piece, StoredTensor, hash_file, write_manifest
    from fullshard.checkpoint.ranges import PROOF
    from fullshard.config import LoraSection
    from fullshard.merge.job import PROMPT
    from fullshard.merge.weights import ExactWeights, ModelNames, logits_by_block
    from fullshard.run_folder import CONFIG, checkpoint_path, write_json

    folder, tokens = checkpoint_path(run, 1), torch.tensor([[*PROMPT]])
    folder.mkdir(parents=True)
    settings = {"rank": 16, "alpha": 32.0, "targets": "all-linear", "variant": "lora"}
    names = ModelNames(base, LoraSection(**settings) if adapter else None)
    if adapter:
        held = load_file(adapter / "adapter_model.safetensors")
        shapes = {name: tuple(value.shape) for name, value in held.items()}
    else:
        shapes = {name: names.weights.shapes[name] for name in dict.fromkeys(names.canonical.values())}
    borders = {
        name: [math.prod(shape) * part // NUM_RANKS for part in range(NUM_RANKS + 1)] for name, shape in shapes.items()
    }
    for part in range(NUM_RANKS):
        tensors = {}
        for name, border in borders.items():
            start, stop = border[part : part + 2]
            made = held[name].reshape(-1)[start:stop] if adapter else values(name, stop - start, start)
            tensors[f"weight/{name}"] = made.clone()
        save_file(tensors, folder / f"part_{part:05d}.safetensors")
    stored = tuple(
        StoredTensor(name, "weight", shapes[name], "F32", tuple(
            Piece(f"part_{part:05d}.safetensors", f"weight/{name}", border[part], border[part + 1])
            for part in range(NUM_RANKS)))
        for name, border in borders.items()
    )  # fmt: skip
    trainer = {"adapter": settings} if adapter else {}
    method = "lora" if adapter else "full"

    def facts() -> dict[str, FileFacts]:
        return {path.name: FileFacts(path.stat().st_size, hash_file(path)) for path in folder.glob("*.safetensors")}

    write_manifest(folder, Manifest(1, method, str(base), stored, facts(), trainer))
    from fullshard.checkpoint.ranges import OwnCheckpoint

    source = OwnCheckpoint(folder)
    exact = ExactWeights(names, source, {} if adapter else None)
    names.weights.load_buffers(names.model)
    save_file({"tokens": tokens, "logits": logits_by_block(names.model, exact.unmerged, tokens)}, folder / PROOF)
    write_manifest(folder, Manifest(1, method, str(base), stored, facts(), trainer))
    write_json(run / CONFIG, {"model": {"path": str(base)}, "data": {}})


def write_adapter(folder: Path, base: Path, layers: int) -> None:
    """A LoRA adapter in PEFT's format, of which every B has moved."""
    from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model
    from safetensors.torch import save_file

    model = build(layers)
    config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    with torch.device("meta"):
        inject_adapter_in_model(config, model)
    modules = {name.split(".lora_")[0] for name, _ in model.named_parameters() if ".lora_" in name}
    config.target_modules, config.base_model_name_or_path = modules, str(base)
    folder.mkdir()
    config.save_pretrained(str(folder))
    shapes = {f"base_model.model.{name}": value.shape for name, value in get_peft_model_state_dict(model).items()}
    made = {name: values(name, shape.numel()).view(shape) for name, shape in shapes.items()}
    save_file(made, folder / "adapter_model.safetensors", metadata={"format": "pt"})


# what is measured: each in a process of its own


def resident(field: str = "VmRSS", process: int | str = "self") -> int:
    """Resident bytes of a process, or their peak (VmHWM)."""
    return int(re.search(rf"{field}:\s+(\d+)", Path(f"/proc/{process}/status").read_text())[1]) * 1024


def ours(place: str, base: str | None, output: str, dtype: str | None) -> dict[str, Any]:
    """Our merge: seconds until the proof begins, and of the proof; memory of both, children included."""
    from fullshard.merge.job import merge_run

    marks, children, done = {}, {}, threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            for child in psutil.Process().children():
                with suppress(OSError, TypeError):  # it has ended
                    children[child.pid] = max(children.get(child.pid, 0), resident("VmRSS", child.pid))

    def progress(word: str) -> None:
        if word == "proving":
            marks["written_bytes"] = resident("VmHWM")
            Path("/proc/self/clear_refs").write_text("5")
        marks[word] = time.perf_counter()

    imports = "import fullshard.merge.job, pathlib; print(pathlib.Path('/proc/self/status').read_text())"
    told = subprocess.run([sys.executable, "-c", imports], capture_output=True, text=True, check=True).stdout
    each = int(re.search(r"VmRSS:\s+(\d+)", told)[1]) * 1024
    threading.Thread(target=watch, daemon=True).start()
    if Path(place).name == "lora":
        import peft  # noqa: F401  an import of ours, too, where there are adapters
    start = begin()
    result = merge_run(place, output, dtype=dtype, base=base, progress=progress)
    end = time.perf_counter()
    done.set()
    over = sum(max(0, peak - each) for peak in children.values())
    return start | {
        "line": result.line, "end": end, "proof_seconds": end - marks["proving"], "children": len(children),
        "written_bytes": marks["written_bytes"] + over, "child_import_bytes": each,
    }  # fmt: skip


def accelerate(place: str, output: str) -> dict[str, float]:
    """accelerate merge-weights."""
    from accelerate.utils import merge_fsdp_weights

    start = begin()
    merge_fsdp_weights(place, output, safe_serialization=True)
    return start | {"end": time.perf_counter(), "proof_seconds": 0.0}


def torch_save(place: str, output: str) -> dict[str, float]:
    """torch's dcp_to_torch_save."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    start = begin()
    dcp_to_torch_save(place, output)
    return start | {"end": time.perf_counter(), "proof_seconds": 0.0}


def peft(adapter: str, base: str, output: str) -> dict[str, float]:
    """PEFT's merge_and_unload, then save_pretrained."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    start = begin()
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype="auto"), adapter)
    model.merge_and_unload().save_pretrained(output)
    return start | {"end": time.perf_counter(), "proof_seconds": 0.0}


def begin() -> dict[str, float]:
    """What stands when the imports are done; the peak is reset."""
    Path("/proc/self/clear_refs").write_text("5")
    return {"baseline_bytes": resident(), "start": time.perf_counter()}


WORKERS = {"ours": ours, "accelerate": accelerate, "torch_save": torch_save, "peft": peft}


def measure(name: str, *arguments: str | None, files: list[Path], output: Path) -> dict[str, Any]:
    """Run one worker with its input out of the page cache; its output goes again."""
    forget(files)
    command = [sys.executable, __file__, "--worker", name, json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    shutil.rmtree(output, ignore_errors=True)
    output.unlink(missing_ok=True) if output.is_file() else None
    seconds = found["end"] - found["start"] - found["proof_seconds"]
    return {
        "seconds": seconds, "proof_seconds": found["proof_seconds"],
        "memory_bytes": found.get("written_bytes", found["peak_bytes"]) - found["baseline_bytes"],
        "proof_memory_bytes": found["peak_bytes"] - found["baseline_bytes"] if "written_bytes" in found else 0,
        "baseline_bytes": found["baseline_bytes"], "line": found.get("line"), "children": found.get("children", 0),
        "child_import_bytes": found.get("child_import_bytes", 0),
    }  # fmt: skip


def forget(files: list[Path]) -> None:
    """Drop files from the page cache, once they are on disk."""
    os.sync()
    for path in files:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def copy(files: list[Path], folder: Path) -> float:
    """Seconds to copy files in blocks of 16 MB, with fsync."""
    forget(files)
    folder.mkdir()
    started = time.perf_counter()
    for path in files:
        with open(path, "rb") as source, open(folder / path.name, "wb") as target:
            shutil.copyfileobj(source, target, 16 << 20)
            target.flush()
            os.fsync(target.fileno())
    seconds = time.perf_counter() - started
    shutil.rmtree(folder)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=8.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="work here, and keep the inputs for another call")
    parser.add_argument("--worker", nargs=2)
    options = parser.parse_args()
    if options.worker:
        name, arguments = options.worker
        found = WORKERS[name](*json.loads(arguments))
        print(json.dumps(found | {"peak_bytes": resident("VmHWM")}))
        return
    place = options.folder or Path(tempfile.mkdtemp(prefix="merge_"))
    place.mkdir(exist_ok=True)
    each = sum(parameter.numel() for parameter in build(2).parameters()) - sum(p.numel() for p in build(1).parameters())
    layers = max(1, round((options.gigabytes * 1e9 / 4 - 2 * 32_000 * LAYER["hidden_size"]) / each))
    base, dcp, run, lora, adapter = (place / name for name in ("base", "dcp", "run", "lora", "adapter"))
    if not lora.is_dir():
        base.mkdir()
        write_base(base, layers)
        torch.multiprocessing.spawn(save_dcp, (str(dcp), layers), NUM_RANKS)
        write_run(run, base)
        write_adapter(adapter, base, layers)
        write_run(lora, base, adapter)
    of = {
        folder: sorted(path for path in folder.rglob("*") if path.is_file())
        for folder in (base, dcp, run, lora, adapter)
    }
    sizes = {folder.name: sum(path.stat().st_size for path in files) for folder, files in of.items()}
    output, jobs, results = place / "merged", {}, {}
    jobs["ours, DCP"] = ("ours", str(dcp), str(base), str(output), "fp32"), of[dcp]
    jobs["accelerate merge-weights, DCP"] = ("accelerate", str(dcp), str(output)), of[dcp]
    jobs["dcp_to_torch_save, DCP"] = ("torch_save", str(dcp), str(output)), of[dcp]
    jobs["ours, own checkpoint"] = ("ours", str(run), None, str(output), "fp32"), of[run]
    jobs["ours, LoRA"] = ("ours", str(lora), None, str(output), None), of[lora] + of[base]
    jobs["PEFT merge_and_unload, LoRA"] = ("peft", str(adapter), str(base), str(output)), of[adapter] + of[base]
    copies = {"DCP": (of[dcp], []), "base": (of[base], [])}
    for _ in range(options.repeats):
        for files, seconds in copies.values():
            seconds.append(copy(files, place / "copy"))
        for name, (job, files) in jobs.items():
            results.setdefault(name, []).append(found := measure(*job, files=files, output=output))
            print(name, {key: value for key, value in found.items() if key != "line"}, flush=True)
    rates = {name: sum(path.stat().st_size for path in files) for name, (files, _) in copies.items()}
    table = {}
    for name, found in results.items():
        kind = "base" if "LoRA" in name else "DCP"
        seconds = spread([one["seconds"] for one in found])
        rate = rates[kind] / seconds["median"]
        table[name] = {
            "seconds": seconds, "memory_bytes": spread([one["memory_bytes"] for one in found]),
            "proof_seconds": spread([one["proof_seconds"] for one in found]), "bytes_per_second": rate,
            "proof_memory_bytes": spread([one["proof_memory_bytes"] for one in found]),
            "baseline_bytes": found[0]["baseline_bytes"], "children": found[0]["children"],
            "child_import_bytes": found[0]["child_import_bytes"],
            "share_of_copy_rate": rate / (rates[kind] / spread(copies[kind][1])["median"]), "proof": found[0]["line"],
        }  # fmt: skip
    command = f"python benchmarks/merge.py --gigabytes {options.gigabytes:g} --repeats {options.repeats}"
    copied = {name: {"bytes": rates[name], "seconds": spread(seconds)} for name, (_, seconds) in copies.items()}
    found = {**hardware(), "layers": layers, "sizes": sizes, "copy": copied, "merges": table}
    write("merge", command, found, ("torch", "transformers", "accelerate", "peft", "safetensors"))
    if not options.folder:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
