"""The command `tuner`: finds the subcommand, and turns errors into one line and an exit code."""

from __future__ import annotations

import errno
import importlib
import sys
import traceback

import click

import tuner
from tuner.errors import StoreError, TunerError

# Subcommand → module below tuner.cli; imported only when used, so that help stays fast.
COMMANDS = {
    "run": "run",
    "predict": "predict",
    "largest": "largest",
    "replay": "replay",
    "targets": "targets",
    "doctor": "doctor",
    "studies": "studies",
    "trials": "trials",
    "pareto": "pareto",
    "best": "best",
    "importance": "importance",
    "query": "query",
    "export": "export",
    "show": "show",
    "rerun": "rerun",
    "stop": "stop",
    "delete": "delete",
    "clean": "clean",
    "app": "app",
    "db": "db",
}
_SUMMARIES = {
    "run": "Search a study's space under a memory budget.",
    "predict": "Predict the peak memory of one configuration, without running it.",
    "largest": "Find the largest value of a parameter that fits the budget.",
    "replay": "Replay a memory snapshot of PyTorch's: peaks, fragmentation, what would change.",
    "targets": "List the GPUs that can be predicted for.",
    "doctor": "Check this machine, and measure the context of its GPUs.",
    "studies": "List the studies in the database.",
    "trials": "List a study's trials.",
    "pareto": "Show the front of metric against peak memory.",
    "best": "Show the best trial that fits the budget.",
    "importance": "Show how much each parameter matters.",
    "query": "Run a SELECT on the database, read-only.",
    "export": "Write a study's trials to a CSV, JSON or Parquet file.",
    "show": "Show everything about one trial.",
    "rerun": "Train a trial again, and compare metric and peak.",
    "stop": "Ask a study's driver to end after the running trial.",
    "delete": "Delete a study.",
    "clean": "Remove run folders and checkpoints that are not needed.",
    "app": "Open the app: fronts, trials, predictions.",
    "db": "Create, upgrade or inspect the database.",
}


class _LazyGroup(click.Group):
    """A group whose commands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"tuner.cli.{COMMANDS[cmd_name]}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, _SUMMARIES[name]) for name in COMMANDS])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            raise click.UsageError(f"there is no command '{args[0]}'; known: {', '.join(COMMANDS)}", ctx)
        return super().resolve_command(ctx, args)


@click.group(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="--debug, anywhere, shows the traceback of an error.",
)
@click.version_option(tuner.__version__, prog_name="tuner")
def group() -> None:
    """Hyperparameter search under a GPU-memory budget.

    Start with: tuner run studies/digits_cnn.py --budget 700MiB --trials 30
    """


def main() -> None:
    """Run the command line and exit with its code."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    debug = len(arguments) < len(sys.argv) - 1
    try:
        code = group.main(arguments, prog_name="tuner", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except TunerError as error:
        if debug:
            traceback.print_exc()
        _say(error.message, error.hint)
        sys.exit(error.exit_code)
    except click.exceptions.Abort:
        _say("aborted", None)
        sys.exit(130)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx is not None else "", err=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        hint = None
        if isinstance(error, click.UsageError) and error.ctx is not None:
            hint = f"see: {error.ctx.command_path} --help"
        _say(error.format_message(), hint)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output went away, as `head` does
        sys.exit(0)
    except OSError as error:
        if debug:
            traceback.print_exc()
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        place = f"{error.filename}: " if error.filename else ""
        _say(f"{place}{'the disk is full' if full else error.strerror or error}", None)
        sys.exit(StoreError.exit_code if full else 1)
    except Exception as error:
        if debug:
            raise
        _say(f"internal error: {type(error).__name__}: {error}", "run again with --debug for the traceback")
        sys.exit(1)


def _say(message: str, hint: str | None) -> None:
    click.echo(f"error: {' '.join(message.split())}", err=True)
    if hint is not None:
        click.echo(f"hint: {hint}", err=True)
