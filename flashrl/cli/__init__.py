"""The command line: data on stdout, everything else on stderr, exit code 0, 1 or 2.

0 is success, 1 a check that failed, 2 bad usage or input.  A command's module is imported when it
is asked for, so ``flashrl --help`` costs nothing.
"""

from __future__ import annotations

import difflib
import importlib
import os

import click

from flashrl import __version__
from flashrl.cli._output import CheckFailure, Failure
from flashrl.core.environment import EnvironmentOptions
from flashrl.core.logs import configure_logging
from flashrl.errors import FlashRLError, VerificationError

__all__ = ["COMMANDS", "main"]

COMMANDS = {
    "doctor": "Show what is installed, which adapters work, and whether 8 bit will pay here.",
    "verify": "Push weights back and forth, and prove that each reload is right.",
    "predict": "Predict the speed-up and the memory of each scheme for a model on a GPU.",
    "profile": "Make a profile of smoothing factors and scales; show, check, compare profiles.",
    "overrides": "Print what a trainer's own launcher takes for a scheme and a correction.",
    "run": "Run a trainer's own launcher with rollouts in 8 bit.",
    "setup": "Write the file that FLASHRL_CONFIG names.",
    "config": "Show or check what FLASHRL_CONFIG, or a file for it, comes to.",
    "cleanup": "Undo what an old install of flash-llm-rl left, and say how to turn FlashRL off.",
    "demo": "Train a real model with INT8 rollouts on this machine, and report.",
    "report": "Draw a folder of training runs as one HTML file.",
}
"""A line each: ``flashrl.cli.<name>`` holds the command, called ``command``."""


class LazyGroup(click.Group):
    """A group that knows its commands' names and help, and imports one when it runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Every name in :data:`COMMANDS`."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"flashrl.cli.{cmd_name}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or suggest one."""
        name = str(args[0])
        if name not in COMMANDS and not name.startswith("-"):
            close = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            ctx.fail(f"No such command {name!r}.{hint} Commands: {', '.join(COMMANDS)}.")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; an error of ours ends as one line, or with FLASHRL_DEBUG=1 in full."""
        try:
            return super().invoke(ctx)
        except FlashRLError as error:
            if os.environ.get("FLASHRL_DEBUG", "0") not in ("", "0"):
                raise
            kind = CheckFailure if isinstance(error, VerificationError) else Failure
            raise kind(str(error)) from error


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", prog_name="flashrl")
def main() -> None:
    """Run reinforcement-learning rollouts in 8 bit, with the training maths kept exact.

    Data goes to stdout (--json on every command), messages to stderr.  Exit code 0 is success, 1 a
    check that failed, 2 bad usage or input.  FLASHRL_DEBUG=1 shows tracebacks.
    """
    configure_logging(EnvironmentOptions.from_environ())
