"""``harness proxy``: make a proxy from a checkpoint, look into one, and prove what it is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli.common import Json, check_file, check_folder, clean_stdout, interruptible, write_json
from harness.cli.progress import Progress, progress
from harness.errors import HarnessError, UsageError, unknown

if TYPE_CHECKING:
    from harness.pairs import Progress as Report

app = typer.Typer(no_args_is_help=True, help="Build and inspect expert-pruned proxies.")
Source = Annotated[str, typer.Argument(metavar="SRC", help="Checkpoint folder, or the name of an original.")]
Calibration = Annotated[
    str,
    typer.Option(
        "--calibration",
        metavar="FILE.jsonl|task[:NAME]|random|none",
        help="Text that the experts are watched on; none selects by the weights alone.",
    ),
]
Tokens = Annotated[int, typer.Option("--tokens", min=1, help="Calibration tokens, about.")]
Budget = Annotated[
    float | None,
    typer.Option("--budget-gb", min=0, help="Memory for hidden states while profiling; the rest waits on disk."),
]
Dtype = Annotated[str | None, typer.Option("--dtype", help="Profile in bf16 or fp32; default: the checkpoint's own.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress.")]
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


@app.callback()
def _proxy() -> None:
    """Build and inspect expert-pruned proxies."""


@app.command("build")
def build(
    source: Source,
    experts: Annotated[int, typer.Option("--experts", min=1, help="Experts to keep per layer.")],
    out: Annotated[Path, typer.Option("--out", help="Folder to make.")],
    strategy: Annotated[str, typer.Option("--strategy", help="Selection strategy.")] = "facility",
    calibration: Calibration = "task",
    tokens: Tokens = 8192,
    profile: Annotated[
        Path | None, typer.Option("--profile", help="A profile made by `harness proxy profile`.")
    ] = None,
    budget_gb: Budget = None,
    dtype: Dtype = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="For strategies that draw.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")] = False,
    quiet: Quiet = False,
    json: Json = None,
) -> None:
    """Keep some experts of every layer, chosen by what they do on calibration text.

    One decoder layer is in memory at a time. An interrupted build goes on at the layer and the shard it had reached.
    """
    check_folder(out.absolute().parent)
    check_file(json)
    with interruptible(), _sentences(), clean_stdout(), progress(quiet=quiet) as shown:
        if dry_run:
            result = _plan(_folder(source, shown.prepare), experts, strategy)
        else:
            result = _build(
                source, experts, out, strategy, calibration, tokens, profile, budget_gb, dtype, seed, shown
            )  # fmt: skip
    if json is not None:
        write_json(result, json)
    if json != "-":
        counts = result["parameters"]
        verb = "would be " if dry_run else ""
        typer.echo(f"{out.absolute()}: {verb}{experts} experts per layer, chosen by {strategy}")
        typer.echo(f"parameters: {counts['proxy']:,} of {counts['original']:,}")
        _tell_mass(result)


def _tell_mass(result: dict[str, Any]) -> None:
    least, experts = result.get("smallest_for_mass"), result["experts"]
    if least is None:
        return
    typer.echo(f"top-k mass can be the original's from {least} experts on")
    if experts < least:
        typer.echo(
            f"warning: with {experts} experts the top-k mass is larger than the original's, so faults that act on it "
            "(a missing renormalisation, say) look smaller than they are",
            err=True,
        )


@contextmanager
def _sentences() -> Iterator[None]:
    """Turn what the builder raises into errors for people."""
    from proxies.checkpoint import CheckpointError

    try:
        yield
    except CheckpointError as e:
        raise UsageError(str(e)) from e
    except OSError as e:
        where = f"{e.filename}: " if e.filename else ""
        raise HarnessError(
            f"{where}{e.strerror}; what was finished is kept, the same command goes on from there"
        ) from e


def _torch_dtype(name: str | None) -> Any:
    if name is None:
        return None
    if name not in DTYPES:
        raise unknown("dtype", name, DTYPES)
    import torch

    return getattr(torch, DTYPES[name])


def _small_caches() -> None:
    """Keep peak memory flat over layers; has to come before torch multiplies its first matrices."""
    from proxies.layerwise import CACHES

    for name, value in CACHES.items():
        os.environ.setdefault(name, value)


def _build(
    source: str,
    experts: int,
    out: Path,
    strategy: str,
    calibration: str,
    tokens: int,
    profile: Path | None,
    budget_gb: float | None,
    dtype: str | None,
    seed: int,
    shown: Progress,
) -> dict[str, Any]:
    from proxies.build import build as build_proxy
    from proxies.select import strategy as check_strategy
    from proxies.verify import check_structure

    check_strategy(strategy)
    folder = _folder(source, shown.prepare)
    check_structure(folder)
    _small_caches()
    measured = None if profile is None else _load_profile(profile)
    return build_proxy(
        folder, out, experts, None if measured else _batches(folder, calibration, tokens), strategy_name=strategy,
        seed=seed, measured=measured, dtype=_torch_dtype(dtype), budget=_bytes(budget_gb), progress=shown.prepare,
    )  # fmt: skip


def _load_profile(path: Path) -> Any:
    from safetensors import SafetensorError

    from proxies.profile import Profile

    try:
        return Profile.load(path)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as e:
        raise UsageError(f"{path} is not a profile that `harness proxy profile` wrote: {e}") from e


def _bytes(gigabytes: float | None) -> int | None:
    return None if gigabytes is None else int(gigabytes * 1e9)


def _batches(folder: Path, calibration: str, tokens: int) -> Any:
    from harness.calibration import calibration as make

    return make(folder, calibration, tokens)


def _plan(folder: Path, experts: int, strategy: str) -> dict[str, Any]:
    """What a build would make, from the headers alone."""
    from proxies.build import check_request, cuts
    from proxies.families import family_of_config
    from proxies.select import strategy as check_strategy
    from proxies.verify import check_structure

    check_strategy(strategy)
    checkpoint = check_structure(folder)
    family = family_of_config(checkpoint.config)
    check_request(checkpoint, family, experts)
    layers = family.moe_layers(checkpoint.config)
    kept = cuts(checkpoint, family, {layer: list(range(experts)) for layer in layers})
    per_layer: dict[str, int] = {}
    for info in checkpoint.tensors.values():
        key = ".".join(info.name.split(".")[:3])
        per_layer[key] = per_layer.get(key, 0) + info.nbytes
    return {
        "schema": "harness/proxy-plan@1",
        "source": str(folder.resolve()),
        "experts": experts,
        "layers_with_experts": len(layers),
        "parameters": {"original": checkpoint.parameters, "proxy": _elements(kept)},
        "bytes": {
            "original": sum(t.nbytes for t in checkpoint.tensors.values()),
            "proxy": sum(c.nbytes for c in kept),
            "largest_layer": max(per_layer.values()),
        },
    }


def _elements(kept: list[Any]) -> int:
    import math

    return sum(math.prod(cut.shape) for cut in kept)


@app.command("profile")
def profile(
    source: Source,
    out: Annotated[Path, typer.Option("--out", help="Safetensors file to make.")],
    calibration: Calibration = "task",
    tokens: Tokens = 8192,
    budget_gb: Budget = None,
    dtype: Dtype = None,
    quiet: Quiet = False,
    json: Json = None,
) -> None:
    """Watch the experts on calibration text and keep the numbers: proxies of several sizes can be built from them."""
    check_folder(out.absolute().parent)
    check_file(json)
    with interruptible(), _sentences(), clean_stdout(), progress(quiet=quiet) as shown:
        folder = _folder(source, shown.prepare)
        _small_caches()
        measured = _measure(folder, calibration, tokens, budget_gb, dtype, shown)
        measured.save(out)
    top_k = _top_k(folder)
    result = {
        "schema": "harness/proxy-profile@1",
        "file": str(out.absolute()),
        "tokens": measured.tokens,
        "layers": {
            str(i): {"used": int((p.frequency > 0).sum()), "experts": p.experts, "topk_mass": measured.topk_mass.get(i)}
            for i, p in measured.layers.items()
        },
        "smallest_for_mass": measured.smallest_for_mass(top_k),
    }
    if json is not None:
        write_json(result, json)
    if json != "-":
        typer.echo(f"{out.absolute()}: {len(measured.layers)} layers, {measured.tokens:,} tokens")
        unused = sum(int((p.frequency == 0).sum()) for p in measured.layers.values())
        typer.echo(f"experts that no token chose: {unused}")
        if result["smallest_for_mass"] is not None:
            typer.echo(f"top-k mass can be the original's from {result['smallest_for_mass']} experts on")


def _measure(
    folder: Path, calibration: str, tokens: int, budget_gb: float | None, dtype: str | None, shown: Progress
) -> Any:
    from proxies.profile import profile as run
    from proxies.profile import profile_of_weights
    from proxies.verify import check_structure

    checkpoint = check_structure(folder)
    batches = _batches(folder, calibration, tokens)
    if batches is None:
        return profile_of_weights(checkpoint)
    tell = lambda done, total: shown.prepare("profiling the layers", done, total)  # noqa: E731
    return run(folder, batches, tell, dtype=_torch_dtype(dtype), budget=_bytes(budget_gb))


def _top_k(folder: Path) -> int:
    from proxies.checkpoint import Checkpoint
    from proxies.families import family_of_config

    config = Checkpoint.open(folder).config
    return family_of_config(config).top_k(config)


@app.command("inspect")
def inspect(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Checkpoint or proxy folder.")], json: Json = None
) -> None:
    """Say what a folder is, from its manifest or its configuration; reads no weights."""
    check_file(json)
    with _sentences():
        result = _describe(folder)
    if json is not None:
        write_json(result, json)
    if json != "-":
        for key, value in result.items():
            if key != "schema" and not isinstance(value, dict):
                number = isinstance(value, int) and not isinstance(value, bool)
                typer.echo(f"{key.replace('_', ' ')}: {value:,}" if number else f"{key.replace('_', ' ')}: {value}")


def _describe(folder: Path) -> dict[str, Any]:
    from proxies.checkpoint import Checkpoint, read_json
    from proxies.families import family_of_config
    from proxies.verify import MANIFEST

    checkpoint = Checkpoint.open(folder)
    family = family_of_config(checkpoint.config)
    result: dict[str, Any] = {
        "schema": "harness/proxy-inspect@1",
        "folder": str(folder.resolve()),
        "model_type": family.model_type,
        "experts": family.experts(checkpoint.config),
        "experts_per_token": family.top_k(checkpoint.config),
        "layers_with_experts": len(family.moe_layers(checkpoint.config)),
        "parameters": checkpoint.parameters,
        "bytes": sum(t.nbytes for t in checkpoint.tensors.values()),
        "dtypes": ", ".join(sorted({t.dtype for t in checkpoint.tensors.values()})),
        "manifest": (folder / MANIFEST).is_file(),
    }
    if result["manifest"]:
        manifest = read_json(folder / MANIFEST)
        for key in ("source", "strategy", "seed", "calibration", "smallest_for_mass"):
            if key in manifest:
                result[key] = manifest[key]
        result["kept_experts"] = manifest.get("kept_experts")
    return result


@app.command("verify")
def verify(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Proxy folder.")],
    against: Annotated[Path | None, typer.Option("--against", help="The original's folder.")] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=8, help="Sample tokens for the comparison inside.")] = 256,
    calibration: Calibration = "random",
    floor: Annotated[
        float | None,
        typer.Option("--floor", min=0, max=1, help="Also score both on the tasks; exit 1 below this share."),
    ] = None,
    quiet: Quiet = False,
    json: Json = None,
) -> None:
    """Prove a proxy: hashes, shapes, no NaN; with the original also every tensor, routing and hidden states."""
    check_file(json)
    if floor is not None and against is None:
        raise UsageError("--floor compares the proxy with its original; name that with --against DIR")
    with interruptible(), _sentences(), clean_stdout(), progress(quiet=quiet) as shown:
        result = _prove(folder, against, tokens, calibration, shown)
        if floor is not None and against is not None:
            result["ability"] = _ability(folder, against, floor, shown)
    if json is not None:
        write_json(result, json)
    if json != "-":
        typer.echo(f"{folder}: {result['files']} files and {result['tensors']} tensors are what the manifest says")
        if against is not None:
            typer.echo(f"{result['compared']} tensors are the original's, bit for bit")
            _layers_table(result["layers"])
        if "ability" in result:
            typer.echo("exact match: " + ", ".join(f"{k} {v:.1%}" for k, v in result["ability"]["rates"].items()))
    refusal = result.get("ability", {}).get("refusal")
    if refusal is not None:
        typer.echo(f"harness: the proxy fails the ability gate: {refusal}", err=True)
        raise typer.Exit(1)


def _ability(folder: Path, against: Path, floor: float, shown: Progress) -> dict[str, Any]:
    from harness.calibration import load_tokenizer
    from harness.rl import ability
    from harness.spec import TaskSpec

    load_tokenizer(folder)
    shown.prepare("scoring both models", 0, 1)
    rates = ability.rates({"original": against, "proxy": folder}, TaskSpec(), 0.0)
    return {"rates": rates, "floor": floor, "refusal": ability.refusal(rates, floor=floor)}


def _prove(folder: Path, against: Path | None, tokens: int, calibration: str, shown: Progress) -> dict[str, Any]:
    from proxies.checkpoint import read_json
    from proxies.verify import MANIFEST
    from proxies.verify import verify as check

    shown.prepare("reading the proxy", 0, 1)
    report = check(folder, against=against)
    result: dict[str, Any] = {"schema": "harness/proxy-verify@1", "folder": str(folder.resolve()), **asdict(report)}
    if against is not None:
        from proxies.similarity import similarity

        _small_caches()
        shown.prepare("comparing with the original", 0, 1)
        kept = {int(layer): experts for layer, experts in read_json(folder / MANIFEST)["kept_experts"].items()}
        batches = _batches(against, calibration, tokens)
        if batches is None:
            raise UsageError("--calibration none: the comparison inside needs text; random is enough")
        result["layers"] = [asdict(layer) for layer in similarity(against, folder, kept, batches)]
    return result


def _layers_table(layers: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="proxy beside original, on the same text")
    for name in ("layer", "kept routing weight", "overlap of load", "load entropy (orig, proxy)", "cosine of states"):
        table.add_column(name, justify="right")
    for x in layers:
        if x["kept_mass"] is None:
            table.add_row(str(x["layer"]), "dense", "", "", f"{x['hidden_cosine']:.3f}")
        else:
            entropy = "{:.2f}, {:.2f}".format(*x["load_entropy"])
            cells = (f"{x['kept_mass']:.2f}", f"{x['load_overlap']:.2f}", entropy, f"{x['hidden_cosine']:.3f}")
            table.add_row(str(x["layer"]), *cells)
    Console().print(table)


def _folder(source: str, report: Report) -> Path:
    from harness.rl.originals import ensure_original, recipe_names
    from harness.store import harness_home

    if Path(source).exists() or "/" in source:
        return Path(source)
    if source not in recipe_names():
        raise unknown("checkpoint folder or original", source, recipe_names())
    return ensure_original(source, harness_home(), lambda step, total, _: report("training the original", step, total))
