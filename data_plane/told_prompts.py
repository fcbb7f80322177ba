"""Which rows' prompts are to be told of, and what a step tells of them. Knows neither logits nor what is sampled."""

from collections.abc import Callable

import torch
from torch import Tensor

from blockplane.data_plane.inputs import StepInputs
from blockplane.data_plane.logprobs import prompt_logprobs
from blockplane.data_plane.rows import Rows
from blockplane.protos.logprobs import Logprobs, join
from blockplane.protos.plan import StepPlan


class ToldPrompts:
    """The rows whose requests ask for log-probabilities of their prompts, and for how many."""

    def __init__(self, rows: Rows, project: Callable[[Tensor], Tensor]) -> None:
        """`project`: hidden states to float32 logits [num_hidden, vocab_size]."""
        self._rows, self._project = rows, project
        self._asked: dict[int, tuple[int, int]] = {}
        """By row, tokens of its prompt and how many of the likeliest are told beside each."""

    def apply(self, plan: StepPlan) -> None:
        """Take over whom a plan releases and admits."""
        for row in plan.released_rows.tolist():
            self._asked.pop(row, None)
        for admission in plan.admissions:
            if admission.params.prompt_logprobs is not None:
                self._asked[admission.row] = admission.num_prompt_tokens, admission.params.prompt_logprobs

    def logprobs(self, prefill: StepInputs, hidden: Tensor) -> Logprobs | None:
        """Of the prompt tokens that follow one which the step computes, segment after segment; None = of none.

        Called before the rows advance.

        Args:
            hidden: [num_padded_tokens, hidden_size].
        """
        if not self._asked:
            return None
        rows, parts = self._rows, []
        segments = zip(
            prefill.rows.tolist(), prefill.num_scheduled_tokens.tolist(), prefill.first_indices.tolist(), strict=True
        )
        for row, num_tokens, start in segments:
            num_prompt_tokens, num_likeliest = self._asked.get(row, (0, 0))
            first = int(rows.num_computed_tokens[row]) + 1
            following = rows.token_ids[row, first : min(first + num_tokens, num_prompt_tokens)]
            if following.size:
                states = hidden[start : start + len(following)]
                parts.append(prompt_logprobs(states, torch.from_numpy(following).long(), self._project, num_likeliest))
        return join(parts) if parts else None
