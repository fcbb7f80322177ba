"""What a worker tells Prometheus of its buckets and its pace. Reads counts, and changes nothing.

It is asked by other threads than the one that computes. Every number is one that only grows and that thread writes in
one piece, so that whoever reads it without waiting has it as it was a moment ago.
"""

from collections.abc import Mapping

from blockplane.data_plane.bucket_counts import Bucket, BucketCounts
from blockplane.data_plane.pace import Pace
from blockplane.protos.metric_families import MetricFamilies

_COUNTERS = (
    ("bucket_executions", "num_runs", "Steps that were computed in a bucket."),
    ("bucket_padding_tokens", "num_padding_tokens", "Tokens of those steps that no request had."),
    ("bucket_builds", "num_builds", "How often a bucket's graph was built."),
    ("bucket_build_seconds", "build_seconds", "What that took."),
)


def worker_metrics(
    model_name: str, pace: Pace, buckets: Mapping[Bucket, BucketCounts], *, is_attached: bool
) -> MetricFamilies:
    families, labels = MetricFamilies(), {"model_name": model_name}
    for bucket, counts in buckets.items():
        for name, attribute, help_text in _COUNTERS:
            of_bucket = {**labels, "phase": bucket.phase, "bucket": bucket.size}
            families.counter(name, help_text, getattr(counts, attribute), of_bucket)
    families.counter("worker_steps", "Steps that were answered.", pace.num_steps, labels)
    families.counter("worker_busy_seconds", "From plans' arrivals to their answers.", pace.busy_seconds, labels)
    families.counter(
        "worker_idle_seconds", "From answers to the next plans' arrivals, while attached.", pace.idle_seconds, labels
    )
    families.gauge("worker_attached", "1 = this worker has built its graphs and serves an engine.", is_attached, labels)
    return families
