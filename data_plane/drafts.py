"""Drafts: what a source of them does in a step, and which of them the target model takes. Knows no source."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from blockplane.data_plane.inputs import StepInputs
from blockplane.protos.plan import Int32Array, IntArray, StepPlan


class DraftSource(Protocol):
    """Guesses how rows go on. A wrong guess costs its computation, and no guess changes what a row says."""

    def build(self) -> None:
        """Make ready whatever shapes the source computes in; called once, before the first step."""
        ...

    def apply(self, plan: StepPlan) -> None:
        """Take over whom a plan releases and admits, once the rows have."""
        ...

    def propose(self, decode_rows: IntArray, most: Int32Array) -> Int32Array:
        """Place drafts behind the known tokens of rows that decode, as `Rows.propose` does.

        Args:
            most: int32 [num_rows], how many drafts each row has room for.

        Returns:
            int32 [num_rows], how many each got.
        """
        ...

    def follow(self, prefill: StepInputs) -> None:
        """Go through the prompt segments that the target computes in this step."""
        ...


def accept(decode: StepInputs, sampled_ids: Int32Array) -> tuple[NDArray[np.bool_], Int32Array]:
    """Take a draft exactly where the target sampled the same token with its own noise, and up to the first difference.

    A row thus gets what it would have got token by token: each of its samples counts whose text before it was right.
    One that is not finite equals no draft, and so is its row's last.

    Args:
        decode: a decode's inputs; the tokens of a row behind its first are its drafts.
        sampled_ids: int32 [num_sampled], what the target sampled after each of them.

    Returns:
        bool [num_sampled], which samples count; int32 [num_rows], how many of each row do.
    """
    num_tokens = decode.num_scheduled_tokens
    offsets = np.arange(decode.max_query_len)
    is_token = offsets < num_tokens[:, None]
    input_ids = decode.input_ids[decode.logits_indices].numpy()
    is_right = np.zeros(is_token.shape, np.bool_)
    is_right[is_token] = sampled_ids == np.append(input_ids[1:], -1)
    # Behind a row's last token stands another row's.
    is_right &= offsets < num_tokens[:, None] - 1
    num_new = 1 + np.logical_and.accumulate(is_right, axis=1).sum(axis=1, dtype=np.int32)
    return (offsets < num_new[:, None])[is_token], num_new
