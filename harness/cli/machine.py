"""``harness ui`` and ``harness doctor``: the tracking server, and what this machine has."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from typing import Annotated, Any

import typer

from harness import __version__
from harness.cli.common import Json, check_file, clean_stdout, write_json

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
    "pyarrow",
    "pydantic",
    "rich",
    "plotly",
    "numpy",
    "scipy",
    "pyyaml",
    "psutil",
)
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
LEAST_FREE_GB = 2.0  # originals, proxies, runs and the MLflow database of the default pair fit many times over


def ui(port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port on loopback.")] = 5000) -> None:
    """Open MLflow's server on loopback, until Ctrl-C."""
    from harness.store import harness_home
    from harness.tracking import serve

    typer.echo(f"MLflow on http://127.0.0.1:{port} (Ctrl-C stops it)", err=True)
    raise typer.Exit(3 if serve(harness_home(), port) else 0)


def doctor(json: Json = None) -> None:
    """Show versions and devices, what is missing, and how to get it."""
    from harness.store import harness_home

    check_file(json)
    home = harness_home()
    versions = {name: _version(name) for name in (*REQUIRED, *OPTIONAL)}
    missing = [name for name in REQUIRED if versions[name] is None]
    problems = [f"{name} is not installed: pip install {name}" for name in missing]
    found: list[dict[str, Any]] = []
    if "torch" not in missing:
        with clean_stdout():
            found = _devices(problems)
    free = round(shutil.disk_usage(home).free / 2**30, 1)
    if free < LEAST_FREE_GB:
        problems.append(f"{home} has {free} GB left: free some space, or set HARNESS_HOME to another folder")
    if not os.access(home, os.W_OK):
        problems.append(f"{home} cannot be written: set HARNESS_HOME to another folder")
    data: dict[str, Any] = {
        "schema": SCHEMA,
        "harness": __version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "versions": versions,
        "missing": missing,
        "devices": found,
        "home": str(home),
        "free_gb": free,
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "problems": problems,
    }
    if json is not None:
        write_json(data, json)
    if json != "-":
        _show(data)
    raise typer.Exit(3 if problems else 0)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices(problems: list[str]) -> list[dict[str, Any]]:
    from harness.rl.device import devices

    try:
        return [vars(device) for device in devices()]
    except (
        Exception
    ) as e:  # a broken torch raises anything from ImportError to OSError, and this is the place to say so
        problems.append(f"torch is installed but cannot be loaded ({type(e).__name__}: {e}): reinstall it")
        return []


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
    for problem in data["problems"]:
        typer.echo(f"problem: {problem}")
