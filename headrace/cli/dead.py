"""`headrace dead`: list the samples that were given up, and requeue them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from headrace.cli import options
from headrace.cli.ledger_of_run import RunLedger, ledger_of
from headrace.cli.status import no_run
from headrace.config.loading import ConfigError, load
from headrace.ledger import ops
from headrace.ledger.replies import DeadSample, Verdict
from headrace.records.json_files import write_json
from headrace.records.layout import RunLayout, find_run
from headrace.system.terminal import one_line

EXIT_FAILED, EXIT_USAGE = 1, 2
_PAGE = 200

DESCRIPTION = (
    "Show the samples of a run that were given up: why, after how many failures, the prompt, and the "
    "traceback. --requeue sends them back to the start and resets their failures. A running run then "
    "generates and trains them like any other; a run that has ended does so when it is started again. Exit "
    "code 1 if some could not be sent back."
)

EXIT_CODES = {1: "some samples could not be sent back", 2: "there is no such run, or no such sample"}
JSON = {
    "id, reason, attempts, failures, crashes, prompt, detail": "of each dead sample, in a list",
    "requeued, refused, not_dead": "ids, with `--requeue`",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    options.run(parser)
    parser.add_argument(
        "--requeue", nargs="*", metavar="ID", help="send these back to the start; all if none is named"
    )
    parser.add_argument(
        "--limit", type=int, default=20, metavar="N", help="show at most N (default: %(default)s; 0 for all)"
    )
    options.as_json(parser)
    told = parser.error

    def error(message: str) -> NoReturn:
        """Explain the order: argparse takes the run in `--requeue RUN` for a sample."""
        hint = "; it goes before --requeue: headrace dead RUN --requeue [ID ...]"
        told(message + hint if message.endswith("required: run") else message)

    parser.error = error  # type: ignore[method-assign]


def main(args: argparse.Namespace) -> int:
    layout = find_run(args.run, args.runs_dir)
    if layout is None:
        print(no_run(args.run, args.runs_dir), file=sys.stderr)
        return EXIT_USAGE
    with ledger_of(layout) as found:
        if args.requeue is not None:
            return _requeue(found, layout, args.requeue, as_json=args.json)
        dead = _read(found)
    shown = dead[: args.limit] if args.limit > 0 else dead
    prompt_of = _decoder(layout)
    if args.json:
        print(json.dumps([_plain(sample, prompt_of) for sample in shown], indent=2))
        return 0
    print("\n".join(_lines(layout.root.name, dead, shown, prompt_of)))
    return 0


def _read(found: RunLedger) -> list[DeadSample]:
    """All dead samples, in order of issue."""
    dead: list[DeadSample] = []
    while page := found.ledger.run(ops.dead(len(dead), _PAGE)):
        dead += page
    return dead


# -- back to the start ----------------------------------------------------------------------------


def _requeue(found: RunLedger, layout: RunLayout, ids: Sequence[str], *, as_json: bool) -> int:
    """Requeue `ids`, or all dead samples. A running run's ledger refuses samples it would no longer train."""
    wanted = list(dict.fromkeys(ids)) or [sample.sample_id for sample in _read(found)]
    verdicts = {i: found.ledger.run(ops.requeue_dead(i, ended=not found.is_on)) for i in wanted}
    back = [i for i, verdict in verdicts.items() if verdict is Verdict.OK]
    refused = [i for i, verdict in verdicts.items() if verdict is Verdict.REFUSED]
    unknown = [i for i, verdict in verdicts.items() if verdict is Verdict.UNKNOWN]
    if back and not found.is_on:
        _no_longer_complete(layout, len(back))
    if as_json:
        print(json.dumps({"requeued": back, "refused": refused, "not_dead": unknown}, indent=2))
    else:
        print(f"{layout.root.name}: {_count(back)} on the way again" if back else "nothing was sent back")
        if back and not found.is_on:
            print("the run has ended: start it again, with the command that started it, to train them")
    if refused:
        way_on = "" if found.in_cluster else "; do this again once it has ended, and start it again"
        print(
            "headrace: the run is ending or has completed, its trainer takes no more samples: "
            f"{_count(refused)} left dead{way_on}",
            file=sys.stderr,
        )
    if unknown:
        print(f"headrace: not dead, or not of this run: {', '.join(unknown)}", file=sys.stderr)
    return EXIT_FAILED if refused or unknown else 0


def _no_longer_complete(layout: RunLayout, count: int) -> None:
    """Mark a completed run as stopped; otherwise `headrace run` would have nothing to do."""
    summary = layout.read_summary()
    if summary is not None and summary.get("status") == "completed":
        reason = f"{count} dead samples were requeued after the run had completed"
        write_json(layout.summary, {**summary, "status": "stopped", "reason": reason})


# -- for people -----------------------------------------------------------------------------------


def _plain(sample: DeadSample, prompt_of: Callable[[bytes], str]) -> dict[str, Any]:
    return {
        "id": sample.sample_id,
        "reason": sample.reason,
        "attempts": sample.attempts,
        "failures": sample.failures,
        "crashes": sample.crashes,
        "prompt": prompt_of(sample.prompt),
        "detail": sample.detail,
    }


def _lines(
    run: str, dead: Sequence[DeadSample], shown: Sequence[DeadSample], prompt_of: Callable[[bytes], str]
) -> list[str]:
    out = [f"{run}: {_count(dead)} dead"]
    told: dict[str, str] = {}
    for sample in shown:
        out.append(
            f"{sample.sample_id}: {sample.reason}; taken {sample.attempts} times, "
            f"{sample.failures} failures, {sample.crashes} crashes of its owner"
        )
        out.append(f"  prompt: {prompt_of(sample.prompt)!r}")
        detail = sample.detail.strip()
        if detail in told:
            out.append(f"  the same as {told[detail]}")
        elif detail:
            told[detail] = sample.sample_id
            out += [f"  {line}" for line in detail.splitlines()]
    if len(dead) > len(shown):
        out.append(f"and {len(dead) - len(shown)} more (--limit)")
    return [one_line(line) for line in out]


def _count(samples: Sequence[Any]) -> str:
    return f"{len(samples)} sample{'' if len(samples) == 1 else 's'}"


def _decoder(layout: RunLayout) -> Callable[[bytes], str]:
    """Return a decoder of prompts to text with special tokens, or to a token count without a tokenizer."""
    tokenizer: Any = None
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(Path(load(layout.config).model.path) / "tokenizer.json"))
    except (ImportError, ConfigError):
        pass
    except Exception as error:  # the library raises bare Exceptions for files that it cannot read
        print(f"headrace: prompts cannot be shown as text: {error}", file=sys.stderr)

    def decode(raw: bytes) -> str:
        from headrace.wire.payloads import WireError, decode_prompt

        try:
            ids = decode_prompt(raw).token_ids.tolist()
        except WireError:
            return "(not readable)"
        if tokenizer is None:
            return f"({len(ids)} tokens)"
        return str(tokenizer.decode(ids, skip_special_tokens=False))

    return decode
