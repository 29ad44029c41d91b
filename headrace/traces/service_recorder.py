"""A service's trace recorder: it writes to the run's directory or sends events to a process that does."""

from __future__ import annotations

from headrace.config.run import RunConfig
from headrace.connections import variables
from headrace.records.layout import RunLayout
from headrace.traces import relay
from headrace.traces.recording import Recorder


def recorder(config: RunConfig, process: str) -> Recorder:
    """Create a service's recorder, enabled by `trace.enable`.

    It writes to the run's directory (HEADRACE_RUN_DIR). Without one, as in the pods of the rollouters and the
    coordinator, it sends events through Redis.
    """
    if not config.trace.enable:
        return Recorder(None, process)
    if (run_dir := variables.run_dir_if_set()) is None:
        return relay.relayed(variables.redis_url(), config.name, process, config.trace.max_events)
    made = Recorder(run_dir, process, max_events=config.trace.max_events)
    if RunLayout(run_dir).in_cluster:  # other processes use the clocks of other nodes
        relay.with_clock(made, variables.redis_url())
    return made
