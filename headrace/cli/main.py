"""The `headrace` command: foreseeable errors come without a traceback.

Exit codes: 0 done; 1 the run failed or the ledger does not balance; 2 the command, the configuration or
its surroundings are at fault; 130 stopped by Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from headrace import __version__

EXIT_FAILED, EXIT_USAGE, EXIT_STOPPED = 1, 2, 130


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="headrace",
        description="Fully asynchronous RL post-training for language models.",
        epilog="`headrace COMMAND --help` tells more about a command.",
    )
    top.add_argument("--version", action="version", version=f"headrace {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)

    run = commands.add_parser(
        "run",
        help="train on this machine",
        description=(
            "Run every service on this machine until training is complete. Ctrl-C stops in order, so that "
            "the same command continues; a second Ctrl-C kills at once."
        ),
    )
    run.add_argument("config", type=Path, help="configuration file (YAML)")
    run.add_argument(
        "overrides",
        nargs="*",
        metavar="key.path=value",
        help="change a key, e.g. rollout.n=4 or trainer.resume=never; the value is YAML. The name of a "
        "further YAML file (configs/modes/one_step_off.yaml) changes every key in it",
    )
    run.add_argument(
        "--dry-run", action="store_true", help="check everything, print what would run, start nothing"
    )

    modes = commands.add_parser(
        "modes",
        help="what a configuration amounts to",
        description="Print the mode of a configuration, its bounds, and what to change for the next mode.",
    )
    modes.add_argument("config", type=Path, help="configuration file (YAML)")
    modes.add_argument("overrides", nargs="*", metavar="key.path=value", help="as for run")

    status = commands.add_parser(
        "status",
        help="how a run is doing",
        description="Show a run that is on (from its ledger) or one that ended (from its summary).",
    )
    audit = commands.add_parser(
        "audit",
        help="check that every sample of a run is accounted for",
        description=(
            "Check that every issued sample is in exactly one place. Reads the run's server if it is up, "
            "else starts the bundled server on the run's files. Exit code 1 if the ledger does not balance."
        ),
    )
    trace = commands.add_parser(
        "trace",
        help="the timeline of a run, for Perfetto",
        description=(
            "Merge what the processes of a run recorded (`trace.enable: true`) into one timeline for "
            "https://ui.perfetto.dev. Works while the run is on."
        ),
    )
    trace.add_argument(
        "--out", type=Path, metavar="FILE", help="compressed when it ends in .gz (default: RUN/trace.json)"
    )
    scale = commands.add_parser(
        "scale",
        help="more or fewer rollouters while a run is on",
        description=(
            "Change the number of rollouters of a run that is on. New ones join without a pause of the "
            "others; those that leave save their unfinished work for the rest. With none the trainer waits."
        ),
    )
    export = commands.add_parser(
        "export",
        help="a checkpoint as a Hugging Face model",
        description="Write the policy of a checkpoint as a directory that transformers and vLLM load.",
    )
    export.add_argument("--step", type=int, metavar="K", help="of this step (default: the newest)")
    export.add_argument("--out", type=Path, required=True, metavar="DIR", help="new or empty directory")
    for command in (status, scale, audit, trace, export):
        command.add_argument("run", help="name of the run, or its directory")
        command.add_argument(
            "--runs-dir", type=Path, default=Path("runs"), help="where runs lie (default: %(default)s)"
        )
    scale.add_argument("wish", metavar="rollouter=N", help="how many there are to be")
    scale.add_argument(
        "--wait",
        nargs="?",
        type=float,
        const=300.0,
        metavar="SECONDS",
        help="return once exactly that many take part (default: 300 seconds at most)",
    )
    status.add_argument("--json", action="store_true", help="print JSON")
    return top


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments. Overrides may stand before and after options (argparse alone takes one place only)."""
    from headrace.config_load import is_file_name

    top = parser()
    args, rest = top.parse_known_args(argv)
    known = [text for text in rest if not text.startswith("-") and ("=" in text or is_file_name(text))]
    odd = [text for text in rest if text not in known]
    if odd or (rest and args.command not in ("run", "modes")):
        top.error(f"unrecognized arguments: {' '.join(odd or rest)}")
    if rest:
        args.overrides = [*args.overrides, *rest]
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the console script; ends the process with the exit code."""
    args = parse(argv)
    try:
        code = _dispatch(args)
    except KeyboardInterrupt:
        code = EXIT_STOPPED
    except BrokenPipeError:
        sys.stderr.close()
        code = EXIT_FAILED
    sys.exit(code)


def _dispatch(args: argparse.Namespace) -> int:
    from headrace.config_load import ConfigError
    from headrace.ledger.client import LedgerError
    from headrace.runner.layout import RunInUseError
    from headrace.valkey_server import ValkeyError

    try:
        if args.command == "run":
            from headrace.cli.run import run

            return run(args.config, args.overrides, dry_run=args.dry_run)
        if args.command == "modes":
            from headrace.cli.modes import modes

            return modes(args.config, args.overrides)
        if args.command == "status":
            from headrace.cli.status import status

            return status(args.run, args.runs_dir, as_json=args.json)
        if args.command == "scale":
            from headrace.cli.scale import scale

            return scale(args.run, args.wish, args.runs_dir, wait_s=args.wait)
        if args.command == "export":
            from headrace.cli.export import export

            return export(args.run, args.runs_dir, args.step, args.out)
        if args.command == "trace":
            from headrace.cli.trace import trace

            return trace(args.run, args.runs_dir, args.out)
        from headrace.cli.audit import audit

        return audit(args.run, args.runs_dir)
    except (ConfigError, RunInUseError) as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    except (ValkeyError, LedgerError) as error:
        print(f"headrace: {error}", file=sys.stderr)
        return EXIT_FAILED
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"headrace: {where}{error.strerror or error}", file=sys.stderr)
        return EXIT_FAILED


if __name__ == "__main__":
    main()
