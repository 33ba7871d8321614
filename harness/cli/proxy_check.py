"""``harness proxy inspect`` and ``verify``: what a folder is, and proof of it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from harness.cli.common import Json, check_file, clean_stdout, interruptible, write_json
from harness.cli.progress import Progress, progress
from harness.cli.proxy_common import Calibration, Quiet, batches_of, sentences, small_caches
from harness.errors import UsageError


def inspect(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Checkpoint or proxy folder.")], json: Json = None
) -> None:
    """Say what a folder is, from its manifest or its configuration; reads no weights."""
    check_file(json)
    with sentences():
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
    with interruptible(), sentences(), clean_stdout(), progress(quiet=quiet) as shown:
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

        small_caches()
        shown.prepare("comparing with the original", 0, 1)
        manifest = read_json(folder / MANIFEST)
        kept = {int(layer): experts for layer, experts in manifest["kept_experts"].items()}
        layers = manifest.get("kept_layers")
        batches = batches_of(against, calibration, tokens)
        if batches is None:
            raise UsageError("--calibration none: the comparison inside needs text; random is enough")
        result["layers"] = [asdict(layer) for layer in similarity(against, folder, kept, batches, layers)]
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
