"""What a worker counts of its buckets: padding to the token, and nothing forgotten where graphs are built anew."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from planes_in_process import Planes

from blockplane.data_plane.backends.cpu import CPU
from blockplane.data_plane.bucket_counts import Bucket, BucketLedger, _bucket
from blockplane.data_plane.graphs import Shape
from blockplane.data_plane.kept_runner import KeptRunner
from blockplane.data_plane.metrics import worker_metrics
from blockplane.data_plane.models.synthetic import SyntheticModel, synthetic_model_info
from blockplane.data_plane.pace import Pace
from blockplane.protos.errors import ProtocolError
from blockplane.protos.plan import Configure
from blockplane.protos.sampling import SamplingParams

SETTINGS = {
    "block_size": "4",
    "num_blocks": "200",
    "max_model_len": "128",
    "num_batched_tokens_buckets": "16,32",
    "num_seqs_buckets": "1,4",
    "prefix_caching": "off",
}
PREFILL_16, PREFILL_32 = Bucket("prefill", "16"), Bucket("prefill", "32")
DECODE_1, DECODE_4 = Bucket("decode", "1"), Bucket("decode", "4")


def planes(**settings: str) -> Planes:
    return Planes(SyntheticModel("float32"), SETTINGS | settings, backend=CPU)


def serve(planes: Planes, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
    for prompt in prompts:
        planes.submit(prompt, SamplingParams(max_tokens, ignore_eos=True))
    planes.run(num_ahead=1)


def test_padding_is_counted_to_the_token_in_the_bucket_that_had_it() -> None:
    one = planes()
    serve(one, [range(10)], max_tokens=4)
    serve(one, [range(9), range(20, 29), range(40, 49)], max_tokens=3)
    ledger = BucketLedger()
    ledger.begin(one.runner.all_graphs)
    counts = ledger.counts()
    assert {bucket: each[:2] for bucket, each in counts.items()} == {
        PREFILL_16: (1, 16 - 10),
        PREFILL_32: (1, 32 - 27),
        DECODE_1: (3, 0),
        DECODE_4: (2, 2 * (4 - 3)),
    }
    assert {each.num_builds for each in counts.values()} == {1}
    assert min(each.build_seconds for each in counts.values()) > 0


@pytest.mark.parametrize("num_draft_tokens", [1, 3])
def test_a_decode_s_padding_is_what_neither_tokens_nor_drafts_fill(num_draft_tokens: int) -> None:
    one = planes(num_draft_tokens=str(num_draft_tokens))
    serve(one, [[1, 2, 3] * 5], max_tokens=20)
    ledger = BucketLedger()
    ledger.begin(one.runner.all_graphs)
    num_runs, num_padding, *_ = ledger.counts()[DECODE_1]
    num_drafts = one.scheduler.statistics().num_draft_tokens
    assert num_runs * (1 + num_draft_tokens) - num_padding == num_runs + num_drafts


def test_a_bucket_is_named_by_its_phase_and_all_that_sets_its_shape_apart() -> None:
    shapes = (Shape(64), Shape(64, is_lone=True), Shape(8, 4), Shape(8, 4, 128))
    assert [_bucket("draft_", shape) for shape in shapes] == [
        ("draft_prefill", "64"),
        ("draft_prefill", "64 alone"),
        ("draft_decode", "4"),
        ("draft_decode", "4 over 128"),
    ]


def test_nothing_goes_down_when_a_worker_builds_its_graphs_anew() -> None:
    model = SyntheticModel("float32")
    kept = KeptRunner(model, synthetic_model_info(128), 0, None)
    configure = Configure(4, 64, 128, num_batched_tokens_buckets=(16,), num_seqs_buckets=(1,))
    graphs = kept.configured(configure).graphs
    graphs.num_runs[Shape(16)], graphs.num_padding_tokens[Shape(16)] = 3, 7
    kept.configured(replace(configure, epoch=9))
    assert kept.buckets.counts()[PREFILL_16][:3] == (3, 7, 1), "graphs that stay are counted once"
    kept.configured(replace(configure, num_blocks=32)).graphs.num_runs[Shape(16)] = 2
    assert kept.buckets.counts()[PREFILL_16][:3] == (5, 7, 2)
    with pytest.raises(ProtocolError):
        kept.configured(replace(configure, num_draft_tokens=1))
    assert kept.buckets.counts()[PREFILL_16][:3] == (5, 7, 2), "a build that fails forgets nothing"


def test_a_worker_tells_every_bucket_and_its_pace() -> None:
    one, pace = planes(), Pace()
    serve(one, [range(10)], max_tokens=2)
    with pace.step():
        pass
    ledger = BucketLedger()
    ledger.begin(one.runner.all_graphs)
    families = worker_metrics("m", pace, ledger.counts(), is_attached=True)
    values = {
        (sample.name.removeprefix("blockplane:"), *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }
    assert values["bucket_padding_tokens_total", "m", "prefill", "16"] == 6
    assert values["bucket_executions_total", "m", "decode", "1"] == 1
    assert values["worker_steps_total", "m"] == values["worker_attached", "m"] == 1
    assert values["worker_busy_seconds_total", "m"] == pace.busy_seconds > 0
