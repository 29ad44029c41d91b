"""`headrace audit`: is every issued sample in exactly one place?"""

from __future__ import annotations

import secrets
import sys
from pathlib import Path

import redis

from headrace import redis_url
from headrace.cli.status import no_run
from headrace.config_load import load
from headrace.ledger.audit import audit as audit_ledger
from headrace.redis_connect import connect
from headrace.runner.layout import RunLayout, find_run, read_json
from headrace.runner.summary import balance_line
from headrace.valkey_server import start_valkey

EXIT_UNBALANCED, EXIT_USAGE = 1, 2


def audit(name: str, runs_dir: Path) -> int:
    """The command; returns the exit code. Raises ConfigError, ValkeyError, LedgerError, RunInUseError."""
    layout = find_run(name, runs_dir)
    if layout is None:
        print(no_run(name, runs_dir), file=sys.stderr)
        return EXIT_USAGE
    run = load(layout.config).name if layout.config.exists() else layout.root.name
    ends = read_json(layout.endpoints) or {}
    if layout.in_use() or ends.get("external_redis"):
        if "redis_url" not in ends:
            print(f"headrace: {layout.root}: the run is still starting; try again", file=sys.stderr)
            return EXIT_USAGE
        return _audit_at(ends["redis_url"], run)
    if not (layout.redis / "appendonlydir").is_dir() and not any(layout.redis.glob("*.aof")):
        print(f"headrace: {layout.redis}: holds no ledger; the run never got that far", file=sys.stderr)
        return EXIT_USAGE
    return _audit_files(layout, run)


def _audit_files(layout: RunLayout, run: str) -> int:
    """Start the bundled server on the run's files for as long as the audit takes."""
    lock = layout.lock(wait_s=1.0)  # so that no runner starts on them meanwhile
    try:
        log = layout.private / "audit-valkey.log"
        with start_valkey(layout.redis, secrets.token_urlsafe(32), log=log) as server:
            return _audit_at(server.url, run)
    finally:
        lock.release()


def _audit_at(url: str, run: str) -> int:
    try:
        with connect(url, timeout_s=60.0) as client:
            report = audit_ledger(client, run)
    except redis.RedisError as error:
        print(f"headrace: {redis_url.masked(url)} cannot be read: {error}", file=sys.stderr)
        return EXIT_UNBALANCED
    print(report.text())
    print(balance_line(report.issued_total, report.counts, report.balanced))
    return 0 if report.balanced else EXIT_UNBALANCED
