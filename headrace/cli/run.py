"""`headrace run`: check, start or resume the run, supervise it, report."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.cli import modes, options
from headrace.config import loading, redis_url
from headrace.config.loading import ConfigError
from headrace.config.modes import describe, warnings
from headrace.config.run import RunConfig
from headrace.connections import variables
from headrace.ledger.marks import Marks
from headrace.ledger.record import LedgerRecord
from headrace.local import assets, ledger_claim, preflight
from headrace.local.progress import make_display
from headrace.local.prometheus import LocalPrometheus
from headrace.local.services import plan
from headrace.local.session import LocalRun, Signals
from headrace.records import checkpoints
from headrace.records import summary as summaries
from headrace.records.checkpoints import RESUMED_FROM, checkpoint_at, complete_checkpoints
from headrace.records.json_files import read_rows
from headrace.records.layout import RunInUseError, RunLayout, RunLock

EXIT_USAGE = 2
_TRAIN_AGAIN = "to train again, add trainer.resume=never (keeps this one aside) or name=..."

DESCRIPTION = (
    "Run every service on this machine until training is complete. Ctrl-C stops gracefully; the same "
    "command then resumes the run. A second Ctrl-C kills at once."
)

EXIT_CODES = {
    0: "complete; or, with `--dry-run`, nothing is wrong",
    1: "failed: a service used up its restarts, or the ledger does not balance",
    2: "the command line, the configuration, data, model or ports cannot be used",
    130: "stopped by Ctrl-C or SIGTERM; the same command resumes the run",
}
JSON = {
    "name": "of the run",
    "directory": "of the run",
    **modes.JSON,
    "updates": "local updates until the data ends",
    "syncs": "policy versions until then",
    "redis": "URL without its password; null: the bundled server",
    "processes": "names of the services, in start order",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    options.configuration(parser)
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything, print what would run, start nothing"
    )
    parser.add_argument("--json", action="store_true", help="with --dry-run: print JSON")
    parser.add_argument(
        "--prometheus",
        nargs="?",
        type=_port,
        const=0,
        metavar="PORT",
        help="also run a Prometheus server that scrapes every service and evaluates the alerts (default: "
        "a free port)",
    )


def _port(text: str) -> int:
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; put key=value before --prometheus")
    return int(text)


def main(args: argparse.Namespace) -> int:
    if args.json and not args.dry_run:
        print(
            "headrace: --json needs --dry-run; use `headrace status RUN --json` for a run's state",
            file=sys.stderr,
        )
        return EXIT_USAGE
    if args.dry_run:
        return dry_run(args.config, args.overrides, prometheus=args.prometheus, as_json=args.json)
    return run(args.config, args.overrides, prometheus=args.prometheus)


def dry_run(
    config_path: Path, overrides: Sequence[str], *, prometheus: int | None = None, as_json: bool = False
) -> int:
    """Check everything and show what would run; returns the exit code. Raises ConfigError."""
    config = _with_password(assets.absolute(loading.load(config_path, overrides)))
    layout = RunLayout(Path(config.runs_dir) / config.name)
    _beside(config, layout, prometheus)
    if layout.in_use():
        raise RunInUseError(
            f"{layout.root}: a run is in progress there; stop it, or choose another name with name=..."
        )
    _check_resume(config, layout)
    if config.trainer.resume == "auto" and (layout.read_summary() or {}).get("status") == "completed":
        print(f"warning: the run in {layout.root} is complete; {_TRAIN_AGAIN}", file=sys.stderr, flush=True)
    _check_checkpoint(config, layout)
    _check(config)
    if as_json:
        print(json.dumps(plan_facts(config), indent=2))
    else:
        _print_plan(config)
    return 0


def _with_password(config: RunConfig) -> RunConfig:
    """Add HEADRACE_REDIS_PASSWORD to redis.url, to keep it off the command line. Raises ConfigError."""
    if config.redis.url is None:
        return config
    url = variables.with_redis_password(config.redis.url)
    return config.model_copy(update={"redis": config.redis.model_copy(update={"url": url})})


def _beside(config: RunConfig, layout: RunLayout, port: int | None) -> LocalPrometheus | None:
    """The requested Prometheus server, or None. Raises ConfigError if it cannot be started."""
    return None if port is None else LocalPrometheus(layout, config.services.host, port)


def run(config_path: Path, overrides: Sequence[str], *, prometheus: int | None = None) -> int:
    """The command; returns the exit code. `prometheus`: port of a Prometheus server; 0 takes a free one.

    Raises ConfigError, RunInUseError, ValkeyError, LedgerError.
    """
    config = _with_password(assets.absolute(loading.load(config_path, overrides)))
    layout = RunLayout(Path(config.runs_dir) / config.name)
    beside = _beside(config, layout, prometheus)
    lock = layout.lock() if layout.root.exists() else None
    try:
        _check_resume(config, layout)
        if lock is not None and config.trainer.resume == "auto" and _already_complete(layout):
            return 0
        _check_checkpoint(config, layout)
        _check(config)
        former = Marks()
        if lock is not None and config.trainer.resume == "never":
            former = LedgerRecord(layout.root).marks
            aside = layout.move_aside()
            print(f"trainer.resume=never: the earlier run is now in {aside}", flush=True)
            lock.release()
            lock = None
        lock = lock or layout.lock()
        resume = resume_command(config_path, overrides, config, prometheus)
        return _run_locked(config, layout, lock, resume, beside, former)
    finally:
        if lock is not None:
            lock.release()


def _check_resume(config: RunConfig, layout: RunLayout) -> None:
    """Raise ConfigError if the existing run cannot resume with this configuration."""
    if config.trainer.resume not in ("auto", "never"):
        try:
            checkpoint_at(layout.checkpoints, Path(config.trainer.resume))
        except ValueError as error:
            raise ConfigError([str(error)]) from None
    if config.trainer.resume != "never" and (changed := layout.changed_keys(config)):
        raise ConfigError(changed)


def _check_checkpoint(config: RunConfig, layout: RunLayout) -> None:
    """Raise ConfigError if the checkpoint to resume from does not belong to this run.

    The trainer verifies the checkpoint's files, which may take minutes.
    """
    there, resume = complete_checkpoints(layout.checkpoints), config.trainer.resume
    if resume == "never" or not there:
        return
    chosen = there[-1] if resume == "auto" else checkpoint_at(layout.checkpoints, Path(resume))
    rows = read_rows(layout.trained)
    try:
        checkpoints.check_belongs(chosen, checkpoints.read_manifest(chosen), config.name, rows)
    except checkpoints.CheckpointError as error:
        raise ConfigError([f"{error}. {checkpoints.instead_of(chosen, config.name, rows)}"]) from None


def _run_locked(
    config: RunConfig,
    layout: RunLayout,
    lock: RunLock,
    resume: str,
    prometheus: LocalPrometheus | None,
    former: Marks,
) -> int:
    """Start or resume the run under its lock. `former`: the ledger of the run that was moved aside."""
    continues = layout.requested.exists()
    record = LedgerRecord(layout.root)
    if not continues:
        if not record.marks.ledger:  # otherwise an earlier start chose the id and then failed
            record.keep(Marks(ledger=uuid.uuid4().hex))
        if config.redis.url is not None:
            ledger_claim.claim(config, layout.root, record.marks, former)
    (layout.checkpoints / RESUMED_FROM).unlink(
        missing_ok=True
    )  # a request to resume from a path applies once
    with Signals() as signals:
        display = make_display(sys.stdout, f"headrace: {config.name}")
        session = LocalRun(config, layout, lock, display, signals, resume, prometheus)
        try:
            verb = "continuing" if continues else "starting"
            display.note(f"{verb} run {config.name} in {layout.root} ({config.derived_mode})")
            return session.run()
        finally:
            session.close()


def _check(config: RunConfig) -> None:
    """Raise ConfigError with all preflight problems, and print warnings. Also checks prepared demo files."""
    ready = assets.demo_ready(config)
    found = preflight.examine(assets.resolve(config) if ready else config)
    if found.problems:
        raise ConfigError(found.problems)
    for text in [*warnings(config), *found.warnings]:
        print(f"warning: {text}", file=sys.stderr, flush=True)


def _already_complete(layout: RunLayout) -> bool:
    """Print the summary if the run is complete and balanced; return whether it is."""
    summary = layout.read_summary()
    if not summary or summary.get("status") != "completed" or not summary.get("balanced"):
        return False  # an unproven run is checked again
    print("\n".join(summaries.lines(summary, layout)))
    print(f"the run is complete; {_TRAIN_AGAIN}")
    return True


def plan_facts(config: RunConfig) -> dict[str, Any]:
    """What `--dry-run --json` prints."""
    made = plan(config)
    return {
        "name": config.name,
        "directory": str(Path(config.runs_dir) / config.name),
        **modes.facts(config),
        "updates": made.updates,
        "syncs": made.syncs,
        "redis": redis_url.masked(config.redis.url) if config.redis.url else None,
        "processes": made.processes,
    }


def _print_plan(config: RunConfig) -> None:
    made = plan(config)
    print("\n".join(describe(config)))
    print(f"updates: {made.updates} (syncs: {made.syncs})")
    print(f"redis: {redis_url.masked(config.redis.url) if config.redis.url else 'bundled Valkey server'}")
    if not assets.demo_ready(config):
        print("demo assets: not prepared yet; the run does that first (about a minute)")
    print(f"processes: {', '.join(made.processes)}")
    print("nothing was started (--dry-run)")


def resume_command(
    config_path: Path, overrides: Sequence[str], config: RunConfig, prometheus: int | None = None
) -> str:
    """The command line that continues the run; passwords masked."""
    kept = []
    for text in overrides:
        key, _, value = text.partition("=")
        if key == "redis.url":
            kept.append(f"{key}={redis_url.masked(value)}")
        elif key != "trainer.resume":
            kept.append(text)
    if config.trainer.resume != "auto" and not any(o.startswith("trainer.resume=") for o in overrides):
        kept.append("trainer.resume=auto")  # the file's value has been applied; do not repeat it
    if prometheus is not None:
        kept += ["--prometheus", *([str(prometheus)] if prometheus else [])]
    return shlex.join(["headrace", "run", str(config_path), *kept])
