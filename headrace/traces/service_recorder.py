"""The recorder of a service: it writes into the run's directory, or sends its events to who does."""

from __future__ import annotations

from headrace.config.run import RunConfig
from headrace.connections import variables
from headrace.records.layout import RunLayout
from headrace.traces import relay
from headrace.traces.recording import Recorder


def recorder(config: RunConfig, process: str) -> Recorder:
    """Of a service, where `trace.enable` asks for it: into its run's directory (HEADRACE_RUN_DIR); a process
    that has none, as the pods of rollouters and coordinator, sends its events through Redis.
    """
    if not config.trace.enable:
        return Recorder(None, process)
    if (run_dir := variables.run_dir_if_set()) is None:
        return relay.relayed(variables.redis_url(), config.name, process, config.trace.max_events)
    made = Recorder(run_dir, process, max_events=config.trace.max_events)
    if RunLayout(run_dir).in_cluster:  # the others' clocks are those of other nodes
        relay.with_clock(made, variables.redis_url())
    return made
