"""The command line: parses words into specifications and prints results. Heavy imports happen inside the commands."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated

import typer

from harness import __version__
from harness.cli import comparing, cost, diffing, faults, importing, machine, proxy, run
from harness.cli.common import INTERRUPTED
from harness.errors import HarnessError

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # a plug-in without its device must not break torch
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

app = typer.Typer(
    name="harness",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Reproduce RL post-training failures of large MoE models on expert-pruned proxies, and score how faithfully.",
)
app.command("run")(run.run)
app.add_typer(faults.app, name="faults")
app.add_typer(proxy.app, name="proxy")
app.command("cost")(cost.cost)
app.command("import")(importing.import_)
app.command("compare")(comparing.compare)
app.command("inspect")(comparing.inspect)
app.command("diff")(diffing.diff)
app.command("ui")(machine.ui)
app.command("doctor")(machine.doctor)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"harness {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks; may stand anywhere.")] = False,
) -> None:
    """Take the options that every command has."""
    ctx.obj = debug


def main(argv: list[str] | None = None) -> None:
    """Run the command line and exit with its status."""
    words, debug = arrange(list(sys.argv[1:] if argv is None else argv))
    try:
        app(words)
    except HarnessError as e:
        _complain(str(e), debug)
        sys.exit(e.exit_code)
    except KeyboardInterrupt:
        typer.echo(INTERRUPTED, err=True)
        sys.exit(130)
    except Exception as e:  # the last line of defence: one sentence, not a page of frames
        frame = traceback.extract_tb(e.__traceback__)[-1]
        where = f"{os.path.basename(frame.filename)}:{frame.lineno}"
        hint = "" if debug else " (--debug shows the traceback)"
        _complain(f"{type(e).__name__} at {where}: {e}{hint}", debug)
        sys.exit(3)


def arrange(words: list[str]) -> tuple[list[str], bool]:
    """Bring a command line into a form that Typer takes.

    Typer has no option with an optional value and no option that may stand behind a command: a bare ``--json`` becomes
    ``--json=-`` (standard output), and ``--debug`` moves to the front. Nothing behind ``--`` is touched.

    Returns:
        The words, and whether ``--debug`` was among them.
    """
    end = words.index("--") if "--" in words else len(words)
    head = ["--json=-" if w == "--json" else w for w in words[:end] if w != "--debug"]
    debug = len(head) < end
    return [*["--debug"][: int(debug)], *head, *words[end:]], debug


def _complain(message: str, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    typer.echo(f"harness: error: {' '.join(message.split())}", err=True)
