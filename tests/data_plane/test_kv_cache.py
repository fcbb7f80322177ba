"""KV cache groups and tensors: the synthetic model's text over each layout, and the layouts that are refused."""

import random
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_player import EnginePlayer
from synthetic_oracle import continue_greedily

from blockplane.data_plane.backends.cpu import CPU
from blockplane.data_plane.kv_cache import bind_kv_caches, layer_kv_specs
from blockplane.data_plane.models.synthetic import SyntheticModel
from blockplane.data_plane.models.synthetic_arithmetic import NUM_CHANNELS, NUM_KV_HEADS, WINDOWS
from blockplane.data_plane.runner import Runner
from blockplane.protos.errors import ProtocolError
from blockplane.protos.kv_cache import KVCacheGroup, KVCacheTensor
from blockplane.protos.plan import Configure

BLOCK_SIZE = 4
NUM_BLOCKS = 130
FIRST, MIDDLE, LAST = NAMES = [f"layers.{index}.self_attn" for index in range(len(WINDOWS))]
TENSOR_SIZE = NUM_BLOCKS * BLOCK_SIZE * NUM_KV_HEADS * NUM_CHANNELS * 4 * 2


def group(*layer_names: str, sliding_window: int | None = None) -> KVCacheGroup:
    return KVCacheGroup(layer_names, NUM_KV_HEADS, NUM_CHANNELS, "float32", sliding_window)


def tensor(*shared_by: str, num_blocks: int = NUM_BLOCKS) -> KVCacheTensor:
    return KVCacheTensor(TENSOR_SIZE // NUM_BLOCKS * num_blocks, shared_by)


WINDOW_GROUP = group(MIDDLE, sliding_window=WINDOWS[1])
HYBRID = Configure(
    BLOCK_SIZE,
    NUM_BLOCKS,
    max_model_len=256,
    num_batched_tokens_buckets=(32, 64, 128),
    num_seqs_buckets=(1, 4),
    kv_cache_groups=(group(FIRST, LAST), WINDOW_GROUP),
    kv_cache_tensors=(tensor(FIRST, MIDDLE), tensor(LAST)),
)
ONE_TENSOR = replace(
    HYBRID,
    num_blocks=216,
    kv_cache_groups=(group(FIRST), group(LAST), WINDOW_GROUP),
    kv_cache_tensors=(tensor(FIRST, MIDDLE, LAST, num_blocks=216),),
)
A_TENSOR_EACH = replace(HYBRID, kv_cache_groups=(WINDOW_GROUP, group(FIRST, LAST)), kv_cache_tensors=())
IN_FP8 = replace(
    HYBRID,
    kv_cache_groups=tuple(replace(kept, dtype="float8_e4m3fn") for kept in HYBRID.kv_cache_groups),
    kv_cache_tensors=tuple(replace(whole, size=whole.size // 4) for whole in HYBRID.kv_cache_tensors),
)


def text(num_tokens: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=num_tokens)


@pytest.mark.parametrize(
    "configure",
    [HYBRID, ONE_TENSOR, A_TENSOR_EACH, IN_FP8],
    ids=["two tensors", "one", "one a layer", "two tensors in FP8"],
)
def test_texts_are_right_while_what_left_a_window_becomes_other_rows_blocks(configure: Configure) -> None:
    """The pool is too small for rows that keep what left the window."""
    kv_cache_dtype = configure.kv_cache_groups[0].dtype
    engine = EnginePlayer(SyntheticModel("float32", kv_cache_dtype=kv_cache_dtype), configure)
    prompts = {0: text(150, 0), 2: text(90, 1), 3: text(10, 2)}
    for row in (0, 2):
        engine.admit(row, prompts[row])
    for step in range(36):
        if step == 4:
            engine.admit(3, prompts[3])
        engine.step()
    assert engine.num_reused > 20
    for row, prompt in prompts.items():
        num_new_tokens = len(engine.texts[row]) - len(prompt)
        assert num_new_tokens > 28
        assert engine.texts[row] == prompt + continue_greedily(prompt, num_new_tokens, ignore_eos=True)
    held = sum(len(block_ids) for groups in engine.block_ids.values() for block_ids in groups)
    assert held > configure.num_blocks, "no row could have kept all its blocks"


def test_a_row_behind_a_cached_prefix_needs_no_blocks_left_of_its_window() -> None:
    engine = EnginePlayer(SyntheticModel("float32"), HYBRID)
    prompt = text(80, 3)
    engine.admit(1, prompt)
    for _ in range(3):
        engine.step()
    num_shared = len(prompt)
    shared = [block_ids[: num_shared // BLOCK_SIZE] for block_ids in engine.block_ids[1]]
    assert shared[1].count(0) == (num_shared - 47) // BLOCK_SIZE
    other = prompt[:num_shared] + text(9, 4)
    # Row 1 goes on no further: it keeps what it shares.
    del engine.texts[1]
    engine.admit(0, other, num_shared, shared)
    for _ in range(4):
        engine.step()
    assert engine.texts[0] == other + continue_greedily(other, 4, ignore_eos=True)


def test_the_layers_of_a_tensor_have_the_same_memory_and_others_their_own() -> None:
    model = SyntheticModel("float32")
    Runner(model, HYBRID)
    first, middle, last = (attention.caches for attention in model.attentions)
    assert first is not None
    assert middle is not None
    assert last is not None
    assert [cache.data_ptr() for cache in first] == [cache.data_ptr() for cache in middle]
    assert len({cache.data_ptr() for cache in (*first, *last)}) == 4
    assert [attention.group for attention in model.attentions] == [0, 1, 0]
    assert sum(cache.nbytes for cache in (*first, *last)) == 2 * TENSOR_SIZE


def test_an_fp8_cache_takes_a_byte_a_number_and_a_model_that_keeps_another_dtype_is_refused() -> None:
    model = SyntheticModel("float32", kv_cache_dtype="float8_e4m3fn")
    Runner(model, IN_FP8)
    caches = {cache.data_ptr(): cache for attention in model.attentions for cache in attention.caches or ()}
    assert {cache.dtype for cache in caches.values()} == {torch.float8_e4m3fn}
    assert sum(cache.nbytes for cache in caches.values()) == 2 * TENSOR_SIZE // 4
    with pytest.raises(ProtocolError, match=r"'float8_e4m3fn'.*'float32'"):
        Runner(SyntheticModel("float32"), IN_FP8)


def test_a_group_without_names_holds_all_layers_and_each_has_its_own_memory() -> None:
    model = SyntheticModel("bfloat16")
    Runner(model, replace(HYBRID, kv_cache_groups=(KVCacheGroup(),), kv_cache_tensors=()))
    caches = [cache for attention in model.attentions for cache in attention.caches or ()]
    assert len({cache.data_ptr() for cache in caches}) == 2 * len(WINDOWS)
    assert {tuple(cache.shape) for cache in caches} == {(NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, NUM_CHANNELS)}
    assert {attention.group for attention in model.attentions} == {0}


REFUSED = {
    "an unknown layer": (
        {"kv_cache_groups": (group(*NAMES, "layers.3.self_attn"),), "kv_cache_tensors": ()},
        "layers.3.self_attn",
    ),
    "a layer in no group": ({"kv_cache_groups": (group(FIRST, LAST),)}, MIDDLE),
    "a layer in two groups": ({"kv_cache_groups": (group(*NAMES), WINDOW_GROUP)}, MIDDLE),
    "no group": ({"kv_cache_groups": ()}, FIRST),
    "all layers and then some": ({"kv_cache_groups": (KVCacheGroup(), WINDOW_GROUP)}, MIDDLE),
    "a layer in no tensor": ({"kv_cache_tensors": (tensor(FIRST, MIDDLE),)}, LAST),
    "a layer in two tensors": ({"kv_cache_tensors": (tensor(FIRST, MIDDLE), tensor(MIDDLE), tensor(LAST))}, MIDDLE),
    "a tensor of an unknown layer": (
        {"kv_cache_tensors": (tensor(*NAMES[:2]), tensor(LAST), tensor("model.norm"))},
        "model.norm",
    ),
    "a tensor of no layer": ({"kv_cache_tensors": (tensor(FIRST, MIDDLE), tensor(LAST), tensor())}, "no layer"),
    "layers of one group in one tensor": (
        {"kv_cache_tensors": (tensor(FIRST, LAST), tensor(MIDDLE))},
        f"{FIRST}, {LAST}.*overwrite",
    ),
    "a tensor of another size": (
        {"kv_cache_tensors": (tensor(FIRST, MIDDLE), tensor(LAST, num_blocks=NUM_BLOCKS + 1))},
        f"{LAST}.*{TENSOR_SIZE + TENSOR_SIZE // NUM_BLOCKS}.*{TENSOR_SIZE}",
    ),
    "a window on a full layer": (
        {"kv_cache_groups": (group(*NAMES, sliding_window=48),), "kv_cache_tensors": ()},
        f"window of 48 tokens.*{FIRST} sees all",
    ),
    "a window that is too short": (
        {"kv_cache_groups": (group(FIRST, LAST), group(MIDDLE, sliding_window=47))},
        f"window of 47 tokens.*{MIDDLE} sees a window of 48 tokens",
    ),
    "another shape": (
        {"kv_cache_groups": (replace(group(FIRST, LAST), num_kv_heads=4), WINDOW_GROUP)},
        rf"\(4, 128, 'float32'\).*{FIRST}.*\(2, 128, 'float32'\)",
    ),
    "another dtype": (
        {"kv_cache_groups": (group(FIRST, LAST), replace(WINDOW_GROUP, dtype="bfloat16"))},
        f"bfloat16.*{MIDDLE}.*float32",
    ),
    "chunks on a layer with a window": (
        {"kv_cache_groups": (group(FIRST, LAST), replace(group(MIDDLE), attention_chunk_size=64))},
        f"chunks of 64 tokens.*{MIDDLE} sees a window of 48 tokens",
    ),
    "drafts": ({"num_draft_tokens": 3}, "3 draft tokens, and this worker proposes 0"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_contradicts_the_model_or_the_worker_is_refused_by_name(fault: str) -> None:
    changes, message = REFUSED[fault]
    with pytest.raises(ProtocolError, match=message):
        Runner(SyntheticModel("float32"), replace(HYBRID, **changes))


def test_layers_of_two_shapes_do_not_share_a_tensor() -> None:
    model = SyntheticModel("float32")
    middle = model.attentions[1]
    middle.spec = replace(middle.spec, num_kv_heads=4, head_dim=64)
    shapes = (replace(WINDOW_GROUP, num_kv_heads=4, head_dim=64),)
    with pytest.raises(ProtocolError, match=rf"{FIRST}, {MIDDLE}.*\(2, 128\), \(4, 64\)"):
        Runner(model, replace(HYBRID, kv_cache_groups=(group(FIRST, LAST), *shapes)))


def test_a_full_group_may_hold_layers_with_a_window() -> None:
    model = SyntheticModel("float32")
    Runner(model, replace(HYBRID, kv_cache_groups=(group(*NAMES),), kv_cache_tensors=tuple(map(tensor, NAMES))))
    assert {attention.group for attention in model.attentions} == {0}


def test_a_layer_that_sees_chunks_says_so_and_may_be_kept_in_chunks_or_whole_but_in_no_others() -> None:
    model = SyntheticModel("float32")
    middle = model.attentions[1]
    middle.spec = replace(middle.spec, sliding_window=None, attention_chunk_size=64)
    assert [spec.attention_chunk_size for spec in layer_kv_specs(model)] == [None, 64, None]
    for kept in (64, None):
        chunks = replace(group(MIDDLE), attention_chunk_size=kept)
        Runner(model, replace(HYBRID, kv_cache_groups=(group(FIRST, LAST), chunks)))
        assert middle.group == 1
    for wrong in (replace(group(MIDDLE), attention_chunk_size=32), group(MIDDLE, sliding_window=64)):
        with pytest.raises(ProtocolError, match=f"{MIDDLE} sees chunks of 64 tokens"):
            Runner(model, replace(HYBRID, kv_cache_groups=(group(FIRST, LAST), wrong)))


def test_layers_are_named_by_their_place_and_say_what_they_see() -> None:
    specs = layer_kv_specs(SyntheticModel("bfloat16"))
    in_fp8 = layer_kv_specs(SyntheticModel("bfloat16", kv_cache_dtype="float8_e4m3fn"))
    assert in_fp8 == tuple(replace(spec, dtype="float8_e4m3fn") for spec in specs)
    assert [spec.name for spec in specs] == NAMES
    assert [spec.sliding_window for spec in specs] == list(WINDOWS)
    assert {(spec.num_kv_heads, spec.head_dim, spec.dtype) for spec in specs} == {
        (NUM_KV_HEADS, NUM_CHANNELS, "bfloat16")
    }


def test_an_earlier_layout_s_memory_is_given_back_before_the_next_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SyntheticModel("float32")
    bind_kv_caches(model, HYBRID, CPU)
    earlier = [weakref.ref(cache) for attention in model.attentions for cache in attention.caches or ()]
    assert all(cache() is not None for cache in earlier)
    allocate = torch.zeros

    def zeros(*shape: Any, **options: Any) -> torch.Tensor:
        assert all(cache() is None for cache in earlier)
        return allocate(*shape, **options)

    monkeypatch.setattr(torch, "zeros", zeros)
    bind_kv_caches(model, ONE_TENSOR, CPU)
