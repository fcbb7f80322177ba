"""What a frontend tells Prometheus of its requests and calls. Reads counts, and changes nothing."""

from blockplane.control_plane.frontend.calls import Calls
from blockplane.control_plane.frontend.request_counts import RequestCounts
from blockplane.protos.metric_families import MetricFamilies

_HISTOGRAMS = (
    ("time_to_first_token_seconds", "first_token", "From a call's beginning to a sample's first token."),
    ("inter_token_latency_seconds", "between_tokens", "From one message of a sample's tokens to the next."),
    ("e2e_request_latency_seconds", "whole", "From a call's beginning to a sample's last token."),
    ("request_decode_time_seconds", "decode", "From a sample's first token to its last."),
    ("request_prompt_tokens", "num_prompt_tokens", "Tokens of the prompt, of each sample that ended well."),
    ("request_generation_tokens", "num_output_tokens", "Tokens of the output, of each sample that ended well."),
)
"""The metric's name, which of the counts it is, and its line of help."""


def frontend_metrics(calls: Calls) -> MetricFamilies:
    families = MetricFamilies()
    for model_name, counts in calls.request_counts.items():
        _tell_requests(families, model_name, counts)
    for status, number in calls.counts.num_errors.items():
        families.counter("request_errors", "Calls that ended with an error.", number, {"status": status})
    families.counter("quota_refusals", "Requests that were more than their callers may have.", calls.quotas.num_refused)
    families.gauge("num_open_calls", "Calls that stream, or wait for it.", calls.counts.num_open)
    families.gauge("num_open_streams", "Samples that have not ended.", calls.link.num_streams)
    families.gauge("engine_attached", "1 = this frontend has its stream to the engine.", calls.link.is_attached)
    families.gauge("serving", "1 = this frontend takes requests.", calls.is_serving)
    return families


def _tell_requests(families: MetricFamilies, model_name: str, counts: RequestCounts) -> None:
    labels = {"model_name": model_name}
    for name, attribute, help_text in _HISTOGRAMS:
        families.histogram(name, help_text, getattr(counts, attribute), labels)
    for reason, number in counts.num_ended.items():
        by_reason = {**labels, "finished_reason": reason}
        families.counter("request_success", "Samples that ended, by their reason.", number, by_reason)
