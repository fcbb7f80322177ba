"""Both planes over the synthetic model, and twins of it that guess well or badly; knows no test."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from planes_in_process import Planes
from torch import Tensor

from blockplane.data_plane.grammars import Grammars
from blockplane.data_plane.kv_cache import attentions_of
from blockplane.data_plane.models.interface import Model
from blockplane.data_plane.models.synthetic import SyntheticModel, synthetic_model_info
from blockplane.data_plane.models.synthetic_arithmetic import EOS_TOKEN_ID
from blockplane.protos.sampling import SamplingParams

SETTINGS = {
    "block_size": 4,
    "num_blocks": 400,
    "max_model_len": 128,
    "num_batched_tokens_buckets": (16, 64),
    "num_seqs_buckets": (1, 2, 4),
    "kv_segment_size_buckets": (16,),
}
GREEDY = SamplingParams(24, ignore_eos=True)


class ImperfectTwin(SyntheticModel):
    """The synthetic model, but that after about every `one_in`-th of its states it says another token."""

    def __init__(self, one_in: int) -> None:
        super().__init__("float32")
        self._one_in = one_in

    def logits(self, hidden: Tensor) -> Tensor:
        logits = super().logits(hidden)
        is_wrong = hidden[:, 0] % self._one_in == 0
        return torch.where(is_wrong[:, None], logits.roll(1, dims=1), logits)


@cache
def target() -> SyntheticModel:
    """What is served; made once, and its caches are those of the planes that were made last."""
    return SyntheticModel("float32")


@cache
def grammars() -> Grammars:
    """What holds the synthetic model's rows to structured outputs."""
    return Grammars(synthetic_model_info(128), num_threads=2)


@cache
def perfect_twin() -> SyntheticModel:
    return SyntheticModel("float32")


@cache
def imperfect_twin() -> ImperfectTwin:
    return ImperfectTwin(one_in=3)


def planes_with(
    num_draft_tokens: int = 0,
    draft_model: Model | None = None,
    *,
    model: Model | None = None,
    kernel_block_size: int | None = None,
    num_proposed: int | None = None,
    **settings: Any,
) -> Planes:
    """Planes whose KV is NaN before it is written. `num_proposed`: the worker's drafts, None = as the engine counts."""
    model = model or target()
    planes = Planes(
        model,
        {**SETTINGS, "num_draft_tokens": num_draft_tokens, **settings},
        eos_token_ids=(EOS_TOKEN_ID,),
        draft_model=draft_model,
        kernel_block_size=kernel_block_size,
        num_draft_tokens=num_proposed,
        grammars=grammars(),
    )
    for attention in attentions_of(model, draft_model):
        for tensor in attention.caches or ():
            tensor.fill_(float("nan"))
    return planes


def text_of(planes: Planes, prompt: Sequence[int], params: SamplingParams = GREEDY, seed: int = 0) -> list[int]:
    """What one request alone says."""
    number = planes.submit(prompt, params, seed)
    planes.run(num_ahead=1)
    return planes.texts[number]


def num_drafted(planes: Planes) -> tuple[int, int]:
    """Drafts that were proposed, and that were accepted, as the engine counts them."""
    statistics = planes.scheduler.statistics()
    return statistics.num_draft_tokens, statistics.num_accepted_tokens
