"""Memory and speed of the proxy builder on random checkpoints: `python -m experiments.benchmarks.proxy_build`.

Memory: peak resident memory of a build with calibration, each in a process of its own, for checkpoints that differ
in their number of layers only. Speed: a build from the weights alone against copying the bytes that it reads and
writes, alternately, on the same disk. `--large` prunes two layers of the shape of Qwen3-235B-A22B (about 10 GB).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from experiments.benchmarks import synthetic
from proxies.checkpoint import CHUNK, Checkpoint
from proxies.layerwise import CACHES

MIB = 1 << 20


def child(source: Path, out: Path, experts: int, mode: str, tokens: int) -> None:
    """Build in this process and print what it took."""
    import torch  # a second or two that belongs to no checkpoint

    from proxies import writer
    from proxies.build import build

    if mode == "unhashed":  # what the hash and the search for NaN cost, by leaving them out
        writer._Sink._check = lambda sink: all(iter(sink._waiting.get, None))  # type: ignore[method-assign]  # a bench may
    batches = None
    if mode == "calibrated":
        made = torch.randint(0, 1000, (tokens // 512, 4, 128), generator=torch.Generator().manual_seed(0))
        batches = [(t, None) for t in made]
    os.sync()  # what an earlier run has left unwritten would slow this one down
    start = time.perf_counter()
    name = "facility" if mode == "calibrated" else "first"
    build(source, out, experts, batches, strategy_name=name, read_back=False)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"seconds": seconds, "peak_mib": peak}))


def run_child(source: Path, experts: int, mode: str, tokens: int = 4096) -> dict[str, float]:
    """Build in a fresh process; returns seconds and peak resident memory in MiB."""
    out = source.with_name("proxy")
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "experiments.benchmarks.proxy_build", "--child", str(source), str(out)]
    command += [str(experts), mode, str(tokens)]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1", **CACHES}
    )
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def copy(source: Path, target: Path) -> float:
    """Copy the proxy's weight files chunk by chunk; returns seconds."""
    target.mkdir()
    os.sync()
    start = time.perf_counter()
    for path in sorted(source.glob("*.safetensors")):
        with path.open("rb", buffering=0) as reader, (target / path.name).open("wb", buffering=0) as writer:
            while chunk := reader.read(CHUNK):
                writer.write(chunk)
    seconds = time.perf_counter() - start
    shutil.rmtree(target)
    return seconds


def layer_mib(folder: Path) -> float:
    """Size of one decoder layer in MiB."""
    tensors = Checkpoint.open(folder).tensors
    return sum(t.nbytes for n, t in tensors.items() if n.startswith("model.layers.0.")) / MIB


def memory(root: Path) -> None:
    """Peak memory against the number of layers."""
    peaks = {}
    for layers in (2, 8, 24):
        source = root / f"{layers}" / "original"
        synthetic.write(source, synthetic.config(layers, hidden=1024, experts=48, inner=512))
        size = layer_mib(source)
        peaks[layers] = run_child(source, 6, "calibrated")["peak_mib"]
        print(f"{layers:3d} layers of {size:.0f} MiB: peak {peaks[layers]:.0f} MiB", flush=True)
        shutil.rmtree(source.parent)
    slope = (peaks[24] - peaks[2]) / 22
    print(f"slope {slope:.2f} MiB per layer = {100 * slope / size:.2f}% of a layer (goal: under 2%)")
    print(f"peak - 1.25 layers = {max(peaks.values()) - 1.25 * size:.0f} MiB (goal: under 600)")


def speed(root: Path, rounds: int) -> None:
    """Build from the weights alone against copying, alternately."""
    source = root / "speed" / "original"
    synthetic.write(source, synthetic.config(8, hidden=2048, experts=64, inner=768))
    for keep in (32, 8):
        ratios: dict[str, list[float]] = {"unhashed": [], "weights": []}
        for _ in range(rounds):
            for mode, found in ratios.items():
                seconds = run_child(source, keep, mode)["seconds"]
                found.append(seconds / copy(source.with_name("proxy"), source.with_name("copy")))
        size = sum(p.stat().st_size for p in source.with_name("proxy").glob("*.safetensors")) / 1e9
        plain, hashed = (median(ratios[mode]) for mode in ("unhashed", "weights"))
        print(
            f"keep {keep}/64, {size:.2f} GB: {plain:.2f} times the copy (goal: at most 2); with hash and search for "
            f"NaN in a second thread {hashed:.2f}",
            flush=True,
        )
    shutil.rmtree(source.parent)


def large(root: Path) -> None:
    """Prune two layers of the shape of Qwen3-235B-A22B."""
    source = root / "large" / "original"
    size = synthetic.write(source, synthetic.config(2, hidden=4096, experts=128, inner=1536, top_k=8, vocab=151936))
    layer = layer_mib(source)
    result = run_child(source, 16, "calibrated", tokens=2048)
    print(
        f"2 layers of {layer:.0f} MiB, {size / 1e9:.1f} GB: {result['seconds']:.0f} s, "
        f"peak {result['peak_mib']:.0f} MiB = {result['peak_mib'] / layer:.2f} layers"
    )
    shutil.rmtree(source.parent)


def main() -> None:
    """Parse the command line and run."""
    if sys.argv[1:2] == ["--child"]:
        source, out, experts, mode, tokens = sys.argv[2:]
        child(Path(source), Path(out), int(experts), mode, int(tokens))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--large", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        if given.large:
            large(Path(name))
        else:
            memory(Path(name))
            speed(Path(name), given.rounds)


if __name__ == "__main__":
    main()
