"""What the engine tells Prometheus of its worker groups and of itself. Reads counts, and changes nothing.

`engine` is a worker group's number, as vLLM's label of that name is a replica's. Counts of a number go on where a
worker is lost and another one gets its number; how it stands now is told of groups that are ready alone.
"""

from blockplane.control_plane.engine.deliveries import Deliveries
from blockplane.control_plane.engine.group import WorkerGroup
from blockplane.control_plane.engine.group_counts import GroupCounts
from blockplane.control_plane.engine.groups import Groups
from blockplane.control_plane.engine.journaling import Journaling
from blockplane.control_plane.engine.transfers import Transfers
from blockplane.protos.metric_families import Labels, MetricFamilies
from blockplane.protos.statistics import EngineStatistics, Statistics

CONDITIONS = ("building", "ready", "draining", "reloading", "leaving")
"""Of worker groups. Each is told of, also where no group is in it, so that a rule finds it."""

_COUNTERS = (
    ("prompt_tokens", "num_prompt_tokens", "Tokens of the prompts that got a row, cached ones included."),
    ("prefix_cache_queries", "num_prompt_tokens", "Tokens of prompts that the prefix cache was asked for."),
    ("prefix_cache_hits", "num_cached_tokens", "Tokens of prompts that it had."),
    ("num_preemptions", "num_preemptions", "How often a request lost its row to others."),
    ("spec_decode_num_draft_tokens", "num_draft_tokens", "Tokens that the worker guessed."),
    ("spec_decode_num_accepted_tokens", "num_accepted_tokens", "Guesses that were right."),
    ("discarded_tokens", "num_discarded_tokens", "Tokens that came behind their request's end."),
    ("plan_bytes", "num_plan_bytes", "Bytes of the plans of steps that were answered."),
    ("idle_seconds", "idle_seconds", "Seconds in which nothing was in flight though requests ran."),
    ("computed_tokens", "num_computed_tokens", "Tokens that steps computed, of prompts and outputs and guesses."),
    ("bucket_tokens", "num_bucket_tokens", "Tokens of the buckets that steps were padded to."),
)
"""The metric's name, what of the statistics it is, and its line of help."""
_GAUGES = (
    ("num_requests_running", "num_running", "Requests with a row."),
    ("num_requests_waiting", "num_waiting", "Requests that wait for a row."),
    ("num_requests_parked", "num_parked", "Requests that do neither, since their clients do not read."),
    ("num_waiting_tokens", "num_waiting_tokens", "Known tokens of the requests that wait."),
    ("kv_cache_usage_perc", "kv_cache_usage", "Share of the KV blocks in use, 1 = all; cached ones are free."),
)


def engine_metrics(
    groups: Groups,
    statistics: EngineStatistics,
    deliveries: Deliveries,
    journaling: Journaling | None,
    transfers: Transfers,
) -> MetricFamilies:
    families = MetricFamilies()
    for number, model_name, counts in groups.counts():
        _tell_counts(families, counts, {"model_name": model_name, "engine": str(number)})
    for group in groups:
        if group.number in statistics.groups:
            _tell_group(families, group, statistics.groups[group.number])
    _tell_whole(families, groups, statistics)
    _tell_transfers(families, transfers)
    families.gauge("num_frontends", "Frontends that are attached.", len(deliveries))
    if journaling is not None:
        families.counter("journal_commits", "Commits of the journal.", journaling.num_commits)
        has_failed = journaling.failure is not None
        families.gauge("journal_failed", "1 = the journal cannot be written, and nothing is served.", has_failed)
    return families


def _tell_counts(families: MetricFamilies, counts: GroupCounts, labels: Labels) -> None:
    for name, attribute, help_text in _COUNTERS:
        families.counter(name, help_text, getattr(counts.past, attribute), labels)
    families.counter("generation_tokens", "Tokens that requests got.", counts.num_output_tokens, labels)
    families.histogram(
        "request_queue_time_seconds", "From a request's coming to its first row.", counts.queue_seconds, labels
    )
    families.histogram(
        "step_seconds",
        "From a step's sending, or the answer before it where that came later, to its answer.",
        counts.step_seconds,
        labels,
    )


def _tell_group(families: MetricFamilies, group: WorkerGroup, statistics: Statistics) -> None:
    labels = {"model_name": group.model.name, "engine": str(group.number)}
    for name, attribute, help_text in _GAUGES:
        families.gauge(name, help_text, getattr(statistics, attribute), labels)
    configure = group.configure
    layout = {"block_size": str(configure.block_size), "num_gpu_blocks": str(configure.num_blocks)}
    families.info("cache_config", "How the KV of a worker group is laid out.", {**labels, **layout})


def _tell_whole(families: MetricFamilies, groups: Groups, statistics: EngineStatistics) -> None:
    conditions = [group.condition for group in groups]
    for condition in CONDITIONS:
        families.gauge("num_workers", "Worker groups.", conditions.count(condition), {"condition": condition})
    families.counter("lost_workers", "How often a ready worker was lost.", statistics.num_lost_workers)
    families.counter(
        "dropped_results",
        "Results of another attach, or of steps that had their answers.",
        statistics.num_dropped_results,
    )
    families.gauge("num_requests_held", "Requests that are at no worker group.", statistics.num_held)
    families.gauge(
        "num_suspects",
        "Requests that were in the step when a worker was lost, and got no token since.",
        statistics.num_suspects,
    )


def _tell_transfers(families: MetricFamilies, transfers: Transfers) -> None:
    families.counter("transfers", "Requests that went on elsewhere with their KV blocks.", transfers.num_transfers)
    families.counter(
        "failed_transfers",
        "Requests that were computed anew elsewhere, since their KV blocks could not be had.",
        transfers.num_failed_transfers,
    )
    families.counter("transferred_blocks", "KV blocks that moved.", transfers.num_transferred_blocks)
    families.gauge("num_requests_moving", "Requests whose KV blocks move; they are held, too.", transfers.num_moving)
    families.histogram(
        "transfer_seconds", "From a request's leaving its group to its coming with its blocks.", transfers.seconds
    )
