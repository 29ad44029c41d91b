"""The `headrace` command. Expected errors are printed without a traceback.

Exit codes: 0 success; 1 the run failed or the ledger does not balance; 2 the command line, the configuration
or the environment is wrong; 130 stopped by Ctrl-C or SIGTERM.

Each command is a module with `DESCRIPTION`, `arguments(parser)` and `main(args)`, which returns the exit
code. `EXIT_CODES` and `JSON` are for docs/cli.md (`headrace.reference.cli`). Only the requested command's
module is imported.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from headrace import __version__
from headrace.system import terminal

EXIT_FAILED, EXIT_USAGE, EXIT_STOPPED = 1, 2, 130

COMMANDS = {
    "run": "train on this machine",
    "validate": "check everything without starting anything",
    "data": "show the data a run would train on: counts, lengths, and prompts token by token",
    "convert-config": "convert a verl configuration",
    "modes": "show the mode of a configuration and its bounds",
    "status": "show the state of a run",
    "scale": "change the number of rollouters during a run",
    "tune": "change the staleness threshold or sync interval during a run",
    "dead": "list the samples that were given up, or requeue them",
    "audit": "check that every sample of a run is accounted for",
    "samples": "show prompts, responses and rewards that were trained",
    "report": "write an HTML report about runs",
    "trace": "write the timeline of a run for Perfetto",
    "export": "export a checkpoint as a Hugging Face model",
    "completion": "print completion of commands and runs for your shell",
}
"""Every command with its help line. `-` in a command's name is `_` in its module's name."""


def parser(only: str | None = None) -> argparse.ArgumentParser:
    """The command-line parser. `only`: the one command to add arguments for; None adds all commands'."""
    top = argparse.ArgumentParser(
        prog="headrace",
        description="Fully asynchronous RL post-training for language models.",
        epilog="`headrace COMMAND --help` describes a command.",
    )
    top.add_argument("--version", action="version", version=f"headrace {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, line in COMMANDS.items():
        if only is None or name == only:
            module = importlib.import_module(f"headrace.cli.{name.replace('-', '_')}")
            command = commands.add_parser(name, help=line, description=module.DESCRIPTION)
            module.arguments(command)
            command.set_defaults(main=module.main)
        else:
            commands.add_parser(name, help=line)
    return top


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line. Overrides may come before and after options, which argparse cannot do alone."""
    from headrace.config.loading import is_file_name

    words = sys.argv[1:] if argv is None else list(argv)
    top = parser(next((word for word in words if word in COMMANDS), ""))
    args, rest = top.parse_known_args(words)
    known = [text for text in rest if not text.startswith("-") and ("=" in text or is_file_name(text))]
    odd = [text for text in rest if text not in known]
    if odd or (rest and not hasattr(args, "overrides")):
        top.error(f"unrecognized arguments: {' '.join(odd or rest)}")
    if rest:
        args.overrides = [*args.overrides, *rest]
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the console script; ends the process with the exit code."""
    terminal.guard()
    try:
        code = _dispatch(parse(argv))  # parsing imports the command, which takes a moment
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = EXIT_STOPPED
    except BrokenPipeError:  # e.g. `| head` has exited: discard the rest of the buffer
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = EXIT_FAILED
    sys.exit(code)


def _dispatch(args: argparse.Namespace) -> int:
    from headrace.config.loading import ConfigError
    from headrace.ledger.client import LedgerError
    from headrace.local.valkey_server import ValkeyError
    from headrace.records.layout import RunInUseError

    try:
        code: int = args.main(args)
        return code
    except (ConfigError, RunInUseError) as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    except (ValkeyError, LedgerError) as error:
        print(f"headrace: {error}", file=sys.stderr)
        return EXIT_FAILED
    except BrokenPipeError:
        raise
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"headrace: {where}{error.strerror or error}", file=sys.stderr)
        return EXIT_FAILED


if __name__ == "__main__":
    main()
