"""What each rank of a worker group builds, from its layers, its memory and the settings; knows nothing of requests."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from blockplane.control_plane.engine.kv_groups import Kind, KVLayout, describe_kind, kind_of, lay_out
from blockplane.control_plane.engine.kv_needs import num_blocks_needed
from blockplane.protos.buckets import BucketRules, check_rules, default_context_buckets
from blockplane.protos.config import Config
from blockplane.protos.errors import ConfigurationError
from blockplane.protos.kv_cache import KVCacheTensor
from blockplane.protos.model import LayerKVSpec
from blockplane.protos.plan import Configure


@dataclass(frozen=True, slots=True)
class RankKV:
    """What one rank of a worker group says of itself.

    Attributes:
        layers: in layer order; heads are those of this rank.
        available_memory: bytes that it can give to KV.
    """

    layers: tuple[LayerKVSpec, ...]
    available_memory: int


def plan_kv_cache(
    config: Config, ranks: Sequence[RankKV], rules: BucketRules, model_max_len: int
) -> tuple[Configure, ...]:
    """Decide what the ranks build, one Configure each; `lay_out` states how layers share blocks.

    All ranks have the same groups, blocks and buckets, so that one block table serves them; only the heads, and with
    them the tensors' sizes, are a rank's own. The rank with the least room sets `num_blocks`. Where ranks share the
    positions of a block it spans as many times the setting `block_size`: requests and segments are reckoned in whole
    blocks, and memory in what a rank keeps of them.

    Prefix caching needs segmented prefill: without it `kv_segment_size` is 0, and the engine caches nothing whatever
    `prefix_caching` says.

    Args:
        model_max_len: tokens that the model was made for.

    Raises:
        ConfigurationError: the settings ask for more than model, memory or backend give, and the message has the
            numbers; the ranks disagree; or the layers are none that the engine can serve.
    """
    _check_ranks_agree(ranks)
    layouts = [lay_out(rank.layers) for rank in ranks]
    common = _common_settings(config, rules, model_max_len)
    num_blocks = _choose_num_blocks(config, common, ranks, layouts)
    return tuple(_configure_rank(common, layout, num_blocks) for layout in layouts)


def _choose_num_blocks(config: Config, common: Configure, ranks: Sequence[RankKV], layouts: Sequence[KVLayout]) -> int:
    """Blocks, the null block included, that fit every rank."""
    block_bytes = [layout.bytes_per_token * common.rank_block_size for layout in layouts]
    num_fitting = [rank.available_memory // size for rank, size in zip(ranks, block_bytes, strict=True)]
    least = num_fitting.index(min(num_fitting))
    num_blocks = config.num_blocks or num_fitting[least]
    room = f"rank {least} gives {ranks[least].available_memory}"
    if num_blocks > num_fitting[least]:
        raise ConfigurationError(
            f"num_blocks is {num_blocks}, which takes {num_blocks * block_bytes[least]} bytes, and {room}; lower it or"
            " raise kv_cache_bytes."
        )
    if num_blocks < 2:
        raise ConfigurationError(
            f"{room} bytes, which hold {num_blocks} blocks of {block_bytes[least]} bytes, and block 0 is never used;"
            " raise kv_cache_bytes."
        )
    # Who sets num_blocks by hand may want a cache smaller than one longest request; memory alone must not make it so.
    num_needed = 1 + _num_blocks_of_the_longest(common, layouts[least])
    if not config.num_blocks and num_blocks < num_needed:
        raise ConfigurationError(
            f"one request of max_model_len {common.max_model_len} needs {num_needed} blocks,"
            f" {num_needed * block_bytes[least]} bytes, and {room}; raise kv_cache_bytes or lower max_model_len."
        )
    return num_blocks


def _common_settings(config: Config, rules: BucketRules, model_max_len: int) -> Configure:
    """What all ranks are told alike, checked; its blocks and groups are not decided yet."""
    max_model_len = _max_model_len(config, model_max_len)
    context_buckets = config.decode_context_length_buckets
    if rules.context_is_a_shape and not context_buckets:
        context_buckets = default_context_buckets(max_model_len, config.group_block_size)
    check_rules(
        rules,
        block_size=config.group_block_size,
        max_model_len=max_model_len,
        num_batched_tokens_buckets=config.num_batched_tokens_buckets,
        kv_segment_size=config.kv_segment_size,
        decode_context_length_buckets=context_buckets,
    )
    return Configure(
        block_size=config.group_block_size,
        num_blocks=0,
        max_model_len=max_model_len,
        num_batched_tokens_buckets=config.num_batched_tokens_buckets,
        num_seqs_buckets=config.num_seqs_buckets,
        kv_segment_size=config.kv_segment_size,
        decode_context_length_buckets=context_buckets,
        prefill_multiple_of=rules.prefill_multiple_of,
        num_draft_tokens=config.num_draft_tokens,
        context_parallel_size=config.context_parallel_size,
    )


def _max_model_len(config: Config, model_max_len: int) -> int:
    """Tokens, prompt and output together.

    Without segmented prefill the last prefill bucket bounds it: a request that loses its blocks is computed anew in one
    segment, output included.
    """
    max_model_len = config.max_model_len or model_max_len
    if max_model_len > model_max_len:
        raise ConfigurationError(
            f"max_model_len is {max_model_len} and the model was made for {model_max_len} tokens; lower the setting."
        )
    if config.kv_segment_size:
        return max_model_len
    last_bucket = config.num_batched_tokens_buckets[-1]
    if config.max_model_len > last_bucket:
        raise ConfigurationError(
            f"max_model_len is {max_model_len}, segmented_prefill is off, and the last of num_batched_tokens_buckets is"
            f" {last_bucket}: no step could compute such a request; switch it on, or raise the bucket."
        )
    return min(max_model_len, last_bucket)


def _num_blocks_of_the_longest(common: Configure, layout: KVLayout) -> int:
    """Blocks for one request of max_model_len, prefilled by the shortest segments that may be."""
    segment = common.segment_multiple if common.kv_segment_size else common.max_num_batched_tokens
    return num_blocks_needed(layout.groups, common.max_model_len, common.block_size, segment)


def _configure_rank(common: Configure, layout: KVLayout, num_blocks: int) -> Configure:
    num_tokens = num_blocks * common.rank_block_size
    return replace(
        common,
        num_blocks=num_blocks,
        kv_cache_groups=layout.groups,
        kv_cache_tensors=tuple(
            KVCacheTensor(num_tokens * tensor.bytes_per_token, tensor.shared_by) for tensor in layout.tensors
        ),
    )


def _check_ranks_agree(ranks: Sequence[RankKV]) -> None:
    """Refuse ranks whose layers differ in more than their shapes: one block table could not serve them all."""
    first = ranks[0].layers
    for number, rank in enumerate(ranks):
        if len(rank.layers) != len(first):
            raise ConfigurationError(
                f"rank {number} has {len(rank.layers)} layers that keep KV and rank 0 has {len(first)};"
                " give all ranks the same model."
            )
        for layer, other in zip(rank.layers, first, strict=True):
            if _what_must_agree(layer) != _what_must_agree(other):
                raise ConfigurationError(
                    f"rank {number} has {_describe(layer)} where rank 0 has {_describe(other)}; give all ranks the same"
                    " model."
                )


def _what_must_agree(layer: LayerKVSpec) -> tuple[str, Kind, str | None]:
    return layer.name, kind_of(layer), layer.shares_kv_with


def _describe(layer: LayerKVSpec) -> str:
    reads = "" if layer.shares_kv_with is None else f", which reads the KV of {layer.shares_kv_with}"
    return f"{layer.name} with {describe_kind(layer)}{reads}"
