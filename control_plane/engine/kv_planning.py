"""How many KV blocks a worker group gets, from its layers and its memory; knows nothing of requests."""

from collections.abc import Sequence

from blockplane.protos.config import Config
from blockplane.protos.errors import ConfigurationError
from blockplane.protos.model import LayerKVSpec
from blockplane.protos.plan import Configure

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


def bytes_per_block(layers: Sequence[LayerKVSpec], block_size: int) -> int:
    """Bytes of one block over all layers: K and V of `block_size` tokens each."""
    return sum(2 * block_size * layer.num_kv_heads * layer.head_dim * DTYPE_BYTES[layer.dtype] for layer in layers)


def plan_kv_cache(
    config: Config, layers: Sequence[LayerKVSpec], available_memory: int, model_max_len: int
) -> Configure:
    """Decide what a worker builds.

    Args:
        available_memory: bytes that the worker can give to KV.
        model_max_len: tokens that the model was made for.

    Raises:
        ConfigurationError: the settings ask for more than the model or the memory gives, and the message has the
            numbers; or the layers are none that the engine knows.
    """
    _check_layers(layers)
    max_model_len = config.max_model_len or model_max_len
    if max_model_len > model_max_len:
        raise ConfigurationError(
            f"max_model_len is {max_model_len} and the model was made for {model_max_len} tokens; lower the setting."
        )
    block_bytes = bytes_per_block(layers, config.block_size)
    num_blocks = config.num_blocks or available_memory // block_bytes
    if num_blocks * block_bytes > available_memory:
        raise ConfigurationError(
            f"num_blocks is {num_blocks}, which takes {num_blocks * block_bytes} bytes, and the worker gives"
            f" {available_memory}; lower it or raise kv_cache_bytes."
        )
    if num_blocks < 2:
        raise ConfigurationError(
            f"{available_memory} bytes hold {num_blocks} blocks of {block_bytes} bytes, and block 0 is never used;"
            " raise kv_cache_bytes."
        )
    # Who sets num_blocks by hand may want a cache smaller than one longest request; memory alone must not make it so.
    num_needed = 1 + -(-max_model_len // config.block_size)
    if not config.num_blocks and num_blocks < num_needed:
        raise ConfigurationError(
            f"one request of max_model_len {max_model_len} needs {num_needed} blocks, {num_needed * block_bytes} bytes,"
            f" and the worker gives {available_memory}; raise kv_cache_bytes or lower max_model_len."
        )
    return Configure(
        block_size=config.block_size,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        num_batched_tokens_buckets=config.num_batched_tokens_buckets,
        num_seqs_buckets=config.num_seqs_buckets,
    )


def _check_layers(layers: Sequence[LayerKVSpec]) -> None:
    if not layers:
        raise ConfigurationError("the worker has no layer that keeps KV; there is nothing to plan for such a model.")
    for layer in layers:
        if layer.dtype not in DTYPE_BYTES:
            raise ConfigurationError(
                f"{layer.name} keeps KV in {layer.dtype}, and this engine knows {', '.join(DTYPE_BYTES)};"
                " choose one of them or run the worker's version of Blockplane."
            )
