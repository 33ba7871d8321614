"""``harness ui`` and ``harness doctor``: the tracking server, and what this machine has."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from typing import Annotated, Any

import typer

from harness import __version__
from harness.cli.common import Json, write_json

SCHEMA = "harness/doctor@1"
REQUIRED: tuple[str, ...] = (
    "torch",
    "transformers",
    "safetensors",
    "deepspeed",
    "mlflow",
    "pandas",
    "scikit-learn",
    "typer",
)
REQUIRED += ("pyarrow", "pydantic", "rich", "plotly")
OPTIONAL = {
    "torch_npu": "Ascend NPUs: install the extra [npu] on a machine with CANN",
    "trl": "the oracle of the tests",
}
VARIABLES = (
    "HARNESS_HOME",
    "MLFLOW_TRACKING_URI",
    "DS_ACCELERATOR",
    "OMP_NUM_THREADS",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
)


def ui(port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port on loopback.")] = 5000) -> None:
    """Open MLflow's server on loopback, until Ctrl-C."""
    from harness.store import harness_home
    from harness.tracking import serve

    typer.echo(f"MLflow on http://127.0.0.1:{port} (Ctrl-C stops it)", err=True)
    raise typer.Exit(3 if serve(harness_home(), port) else 0)


def doctor(json: Json = None) -> None:
    """Show versions and devices, what is missing, and how to get it."""
    from harness.rl.device import devices
    from harness.store import harness_home

    home = harness_home()
    versions = {name: _version(name) for name in (*REQUIRED, *OPTIONAL)}
    missing = [name for name in REQUIRED if versions[name] is None]
    data: dict[str, Any] = {
        "schema": SCHEMA,
        "harness": __version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "versions": versions,
        "missing": missing,
        "devices": [] if "torch" in missing else [vars(d) for d in devices()],
        "home": str(home),
        "free_gb": round(shutil.disk_usage(home).free / 2**30, 1),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }
    if json is not None:
        write_json(data, json)
    if json != "-":
        _show(data)
    raise typer.Exit(3 if missing else 0)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _show(data: dict[str, Any]) -> None:
    typer.echo(f"harness {data['harness']}, Python {data['python']}, {data['machine']}")
    for name, version in data["versions"].items():
        hint = "" if version else f"missing: {OPTIONAL.get(name, f'pip install {name}')}"
        typer.echo(f"  {name:<14} {version or hint}")
    for device in data["devices"]:
        typer.echo(f"  {device['kind']:<14} {'usable' if device['usable'] else 'not usable'}: {device['detail']}")
    typer.echo(f"home: {data['home']} ({data['free_gb']} GB free)")
    for name, value in data["environment"].items():
        typer.echo(f"  {name}={value}")
