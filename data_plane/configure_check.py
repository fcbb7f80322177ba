"""What an engine's configuration must be before anything is built from it. Knows no tensors and builds nothing."""

from blockplane.protos.buckets import check_buckets, check_context_buckets
from blockplane.protos.errors import ConfigurationError, ProtocolError
from blockplane.protos.kv_cache import KVCacheGroup
from blockplane.protos.plan import Configure


def check_configure(configure: Configure, max_model_len: int, kv_bytes: int, available_memory: int) -> None:
    """Refuse what no engine asks for that plans as ours does.

    Args:
        max_model_len: tokens, of this worker's model.
        kv_bytes: what the KV of this configuration takes. available_memory: what the worker offered.

    Raises:
        ProtocolError: a number is out of its range; the message names it.
    """
    _require(configure.block_size > 0, f"blocks of {configure.block_size} tokens")
    num_sharing = configure.context_parallel_size
    is_shared = num_sharing > 0 and configure.block_size % num_sharing == 0
    _require(is_shared, f"blocks of {configure.block_size} tokens, shared by {num_sharing} ranks")
    _require(configure.num_blocks > 1, f"{configure.num_blocks} blocks, and block 0 is never used")
    is_within = 0 < configure.max_model_len <= max_model_len
    _require(is_within, f"max_model_len {configure.max_model_len}, and the model has {max_model_len}")
    _require(configure.prefill_multiple_of > 0, f"prefill_multiple_of {configure.prefill_multiple_of}")
    _require(bool(configure.kv_cache_groups), "no KV cache group")
    _require(all(map(_sees_something, configure.kv_cache_groups)), "a KV cache group that keeps nothing")
    try:
        check_buckets("num_batched_tokens_buckets", configure.num_batched_tokens_buckets)
        check_buckets("num_seqs_buckets", configure.num_seqs_buckets)
        if contexts := configure.decode_context_length_buckets:
            check_context_buckets(contexts, configure.block_size, configure.max_model_len)
    except ConfigurationError as error:
        raise ProtocolError(f"the engine's configuration is none: {error}") from error
    _require(kv_bytes <= available_memory, f"{kv_bytes} bytes of KV, and this worker offered {available_memory}")


def _sees_something(group: KVCacheGroup) -> bool:
    return all(limit is None or limit > 0 for limit in (group.sliding_window, group.attention_chunk_size))


def _require(condition: bool, fault: str) -> None:
    if not condition:
        raise ProtocolError(f"the engine asks for {fault}; run the same version of Blockplane on both.")
