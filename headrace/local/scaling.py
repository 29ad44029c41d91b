"""Scale a local run's rollouters: the request by `headrace scale`, and the runner that carries it out.

The command writes `private/scale.json`. The runner checks the file once a second, starts missing replicas
and stops surplus ones gracefully. A new replica takes the lowest free number; the highest leave first. Each
start of a run begins with `rollout.replicas`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from headrace.config.run import RunConfig
from headrace.local.processes import ProcessState, Supervisor
from headrace.local.services import ROLLOUTER, Endpoints, rollouter, rollouter_name
from headrace.records.json_files import write_json
from headrace.records.layout import RunLayout

LARGEST = 64
"""Most rollouters on one machine; more is probably a typo."""


def ask(layout: RunLayout, rollouters: int) -> None:
    """Request this number of rollouters from the running run."""
    write_json(layout.scale, {"rollouter": rollouters}, mode=0o600)


def asked(layout: RunLayout) -> int | None:
    """The number requested last; None if none was. Raises ValueError for an invalid file."""
    try:
        wanted = json.loads(layout.scale.read_text())["rollouter"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{layout.scale} cannot be read: {error!r}") from error
    if type(wanted) is not int or not 0 <= wanted <= LARGEST:
        raise ValueError(f"{layout.scale}: rollouter is {wanted!r}; it must be 0 to {LARGEST}")
    return wanted


def _stamp(path: Path) -> tuple[int, int] | None:
    """A value that changes whenever the file is replaced; None if there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


class Scaling:
    """The runner's side. Call `tick` once a second."""

    def __init__(
        self,
        config: RunConfig,
        layout: RunLayout,
        ends: Endpoints,
        supervisor: Supervisor,
        note: Callable[[str], None],
    ) -> None:
        self.ends = ends
        self._config = config
        self._layout = layout
        self._supervisor = supervisor
        self._note = note
        self._wanted = config.rollout.replicas
        layout.scale.unlink(missing_ok=True)
        self._heard = _stamp(layout.scale)

    def tick(self) -> None:
        for replica in list(self.ends.rollouter_ports):  # free the numbers of replicas that left
            if rollouter_name(replica) not in self._supervisor.children:
                self.ends = self.ends.without_rollouter(replica)
        self._wanted -= sum(name.startswith(ROLLOUTER) for name in self._supervisor.given_up)
        self._supervisor.given_up.clear()
        self._hear()
        staying = sorted(self._staying())
        for replica in staying[self._wanted :]:
            self._supervisor.retire(rollouter_name(replica), self._config.services.stop_timeout_s)
        for _ in range(self._wanted - len(staying)):
            free = next(n for n in range(2 * LARGEST) if n not in self.ends.rollouter_ports)
            self.ends = self.ends.with_rollouter(free)
            # Not essential: the run has worked without it, so it need not fail if this one cannot start.
            self._supervisor.add(rollouter(self._config, self._layout, self.ends, free, essential=False))

    def _hear(self) -> None:
        """Take up a new request. A repeated request for the same number counts as new."""
        stamp = _stamp(self._layout.scale)
        if stamp == self._heard:
            return
        self._heard = stamp
        try:
            wanted = asked(self._layout)
        except ValueError as error:
            self._note(str(error))
            return
        if wanted is not None and wanted != self._wanted:
            self._note(f"rollouters: {self._wanted} -> {wanted}")
            self._wanted = wanted

    def _staying(self) -> list[int]:
        children = self._supervisor.children
        return [
            replica
            for replica in self.ends.rollouter_ports
            if (child := children.get(rollouter_name(replica))) is not None
            and child.state is not ProcessState.LEAVING
        ]
