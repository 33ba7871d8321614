"""``harness cost``: what an MoE model and its proxies with fewer experts hold, counted from config.json."""

from __future__ import annotations

import json as json_
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer

from harness.cli.common import Json, check_file, write_json
from harness.cost.parameters import EXPERT_KEYS, Parameters, count_parameters
from harness.errors import UsageError, unknown

SCHEMA = "harness/cost@1"
STATE_BYTES = 16  # bf16 weights and gradients, fp32 master weights and two Adam moments (arXiv 1910.02054)
NOTE = (
    "Counted, not measured. State: weights, gradients and Adam in mixed precision, 16 bytes per parameter, a lower "
    "bound without activations. At fixed top-k active parameters are equal but for the rows of the router."
)


def cost(
    model: Annotated[str, typer.Argument(help="Name of a published model, a config.json, or a checkpoint folder.")],
    experts: Annotated[list[int] | None, typer.Option("--experts", help="Experts of a proxy; may be repeated.")] = None,
    json: Json = None,
) -> None:
    """Count the parameters of a model and of its proxies with fewer experts."""
    check_file(json)
    config, folder = _load(model)
    original = count_parameters(config)
    key = next(k for k in EXPERT_KEYS if config.get(k) is not None)
    rows = [_row(original, original)]
    for kept in experts or []:
        if not original.top_k <= kept < original.count:
            bounds = f"top-k {original.top_k} and less than {original.count}"
            raise UsageError(f"--experts {kept}: a proxy of {model} needs at least {bounds} experts")
        rows.append(_row(count_parameters({**config, key: kept}), original))
    data: dict[str, Any] = {"schema": SCHEMA, "model": model, "rows": rows, "note": NOTE}
    if folder is not None:
        from proxies.checkpoint import Checkpoint, CheckpointError

        try:
            data["on_disk"] = Checkpoint.open(folder).parameters
        except CheckpointError as e:
            raise UsageError(str(e)) from e
    if json is not None:
        write_json(data, json)
    if json != "-":
        _show(data)


def _load(model: str) -> tuple[dict[str, Any], Path | None]:
    path = Path(model)
    folder = path if path.is_dir() else None
    if not path.exists():
        published = files("experiments") / "models"
        names = [p.name.removesuffix(".json") for p in published.iterdir() if p.name.endswith(".json")]
        if model not in names:
            raise unknown("model", model, names)
        text = (published / f"{model}.json").read_text(encoding="utf-8")
    else:
        try:
            text = (path / "config.json" if folder else path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise UsageError(f"{model}: no config.json can be read there ({e})") from e
    try:
        config = json_.loads(text)
    except json_.JSONDecodeError as e:
        raise UsageError(f"{model} is not valid JSON ({e})") from e
    if not isinstance(config, dict) or all(config.get(k) is None for k in EXPERT_KEYS):
        raise UsageError(f"{model} has no experts: its config sets none of {', '.join(EXPERT_KEYS)}")
    return config, folder


def _row(counts: Parameters, original: Parameters) -> dict[str, Any]:
    return {
        **vars(counts),
        "total": counts.total,
        "active": counts.active,
        "active_without_embedding": counts.active_without_embedding,
        "experts_share": counts.experts_share,
        "state_bytes": STATE_BYTES * counts.total,
        "ratio": original.total / counts.total,
    }


def _show(data: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=data["model"], box=None, title_justify="left")
    for name in ("experts", "total", "active", "in experts", "state", "ratio"):
        table.add_column(name, justify="right")
    for row in data["rows"]:
        sizes = (f"{row['total'] / 1e9:.2f}B", f"{row['active'] / 1e9:.2f}B", f"{row['experts_share']:.1%}")
        table.add_row(str(row["count"]), *sizes, f"{row['state_bytes'] / 1e9:.0f} GB", f"{row['ratio']:.2f}")
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(table)
    console.print(data["note"])
    if "on_disk" in data:
        counted = data["rows"][0]["total"]
        said = "as counted" if data["on_disk"] == counted else f"but {counted} are counted from the config"
        console.print(f"on disk: {data['on_disk']} parameters, {said}")
