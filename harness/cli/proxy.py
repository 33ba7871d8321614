"""``harness proxy``: make a proxy from a checkpoint; `proxy_check` looks into one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from harness.cli import proxy_check, proxy_compare
from harness.cli.common import Json, check_file, check_folder, clean_stdout, interruptible, write_json
from harness.cli.progress import Progress, progress
from harness.cli.proxy_common import (
    Budget,
    Calibration,
    Dtype,
    Quiet,
    Source,
    Tokens,
    batches_of,
    folder_of,
    sentences,
    small_caches,
)
from harness.errors import UsageError, unknown

app = typer.Typer(no_args_is_help=True, help="Build and inspect expert-pruned proxies.")
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
    layers: Annotated[
        int | None, typer.Option("--layers", min=2, help="Also keep only so many layers, by block influence.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")] = False,
    quiet: Quiet = False,
    json: Json = None,
) -> None:
    """Keep some experts of every layer, chosen by what they do on calibration text.

    One decoder layer is in memory at a time. An interrupted build goes on at the layer and the shard it had reached.
    """
    check_folder(out.absolute().parent)
    check_file(json)
    with interruptible(), sentences(), clean_stdout(), progress(quiet=quiet) as shown:
        if dry_run:
            result = _plan(folder_of(source, shown.prepare), experts, strategy)
        else:
            result = _build(
                source, experts, out, strategy, calibration, tokens, profile, budget_gb, dtype, seed, layers, shown
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


def _torch_dtype(name: str | None) -> Any:
    if name is None:
        return None
    if name not in DTYPES:
        raise unknown("dtype", name, DTYPES)
    import torch

    return getattr(torch, DTYPES[name])


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
    layers: int | None,
    shown: Progress,
) -> dict[str, Any]:
    from proxies.build import build as build_proxy
    from proxies.select import searches
    from proxies.select import strategy as check_strategy
    from proxies.verify import check_structure

    check_strategy(strategy)
    folder = folder_of(source, shown.prepare)
    check_structure(folder)
    small_caches()
    measured = None if profile is None else _load_profile(profile)
    text = measured is None or searches(strategy)  # a search needs text even where the profile is at hand
    return build_proxy(
        folder, out, experts, batches_of(folder, calibration, tokens) if text else None, strategy_name=strategy,
        seed=seed, layers=layers, measured=measured, dtype=_torch_dtype(dtype), budget=_bytes(budget_gb),
        progress=shown.prepare, note=_note,
    )  # fmt: skip


def _note(text: str) -> None:
    typer.echo(f"harness: {text}", err=True)


def _load_profile(path: Path) -> Any:
    from safetensors import SafetensorError

    from proxies.profile import Profile

    try:
        return Profile.load(path)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as e:
        raise UsageError(f"{path} is not a profile that `harness proxy profile` wrote: {e}") from e


def _bytes(gigabytes: float | None) -> int | None:
    return None if gigabytes is None else int(gigabytes * 1e9)


def _plan(folder: Path, experts: int, strategy: str) -> dict[str, Any]:
    """What a build would make, from the headers alone."""
    from proxies.cuts import check_request, cuts
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
    outputs: Annotated[
        bool, typer.Option("--outputs", help="Also what every expert answers to every token, for strategies that ask.")
    ] = False,
    quiet: Quiet = False,
    json: Json = None,
) -> None:
    """Watch the experts on calibration text and keep the numbers: proxies of several sizes can be built from them."""
    check_folder(out.absolute().parent)
    check_file(json)
    with interruptible(), sentences(), clean_stdout(), progress(quiet=quiet) as shown:
        folder = folder_of(source, shown.prepare)
        small_caches()
        measured = _measure(folder, calibration, tokens, budget_gb, dtype, outputs, shown)
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
    folder: Path,
    calibration: str,
    tokens: int,
    budget_gb: float | None,
    dtype: str | None,
    outputs: bool,
    shown: Progress,
) -> Any:
    from functools import partial

    from proxies.profile import profile as run
    from proxies.profile_of_weights import profile_of_weights
    from proxies.verify import check_structure

    checkpoint = check_structure(folder)
    batches = batches_of(folder, calibration, tokens)
    if batches is None:
        return profile_of_weights(checkpoint)
    tell = partial(shown.prepare, "profiling the layers")
    return run(folder, batches, tell, dtype=_torch_dtype(dtype), budget=_bytes(budget_gb), note=_note, outputs=outputs)


def _top_k(folder: Path) -> int:
    from proxies.checkpoint import Checkpoint
    from proxies.families import family_of_config

    config = Checkpoint.open(folder).config
    return family_of_config(config).top_k(config)


app.command("inspect")(proxy_check.inspect)
app.command("verify")(proxy_check.verify)
app.command("compare-strategies")(proxy_compare.compare_strategies)
