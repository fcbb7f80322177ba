"""What requests have, put into the outboxes of the frontends that read them. Knows neither groups nor the journal."""

from collections.abc import Collection

from blockplane.control_plane.engine.outbox import Outbox
from blockplane.control_plane.engine.request import Request
from blockplane.control_plane.engine.slots import Slots
from blockplane.control_plane.engine.step import StepOutputs
from blockplane.protos.delivery import Ending, PromptLogprobs, ServingState
from blockplane.protos.errors import BlockplaneError
from blockplane.protos.finish import FinishReason


class Deliveries:
    """The attached frontends, and who reads what: requests' own owners and streams, or what their slots say."""

    def __init__(self) -> None:
        self._outboxes: dict[int, Outbox] = {}
        """By owner: every frontend gets a number of its own when it attaches."""
        self._num_owners = 0
        self.slots: Slots | None = None
        """Of journaled requests, which all requests are where there is a journal."""

    def attach(self) -> int:
        owner, self._num_owners = self._num_owners, self._num_owners + 1
        self._outboxes[owner] = Outbox()
        return owner

    def detach(self, owner: int) -> None:
        """Nobody may read there any more."""
        del self._outboxes[owner]

    def __getitem__(self, owner: int) -> Outbox:
        return self._outboxes[owner]

    def __len__(self) -> int:
        """How many frontends are attached."""
        return len(self._outboxes)

    def __contains__(self, owner: int) -> bool:
        return owner in self._outboxes

    def reader(self, request: Request) -> tuple[int, int] | None:
        """The owner and the stream that get what a request has; None = nobody reads it."""
        return (request.owner, request.stream_id) if self.slots is None else self.slots.reader(request)

    def put(self, outputs: StepOutputs) -> None:
        """Put in, unflushed, what clients are to get."""
        for request, told in outputs.told_prompts:
            if (reader := self.reader(request)) is not None:
                owner, stream_id = reader
                self._outboxes[owner].put_prompt_logprobs(PromptLogprobs(stream_id, told))
        if outputs.token_ids.size:
            self._put_tokens(outputs)
        for request, outcome in outputs.finished:
            self.put_ending(request, outcome)

    def _put_tokens(self, outputs: StepOutputs) -> None:
        is_one_owners = self.slots is None and len(self._outboxes) == 1
        if self.slots is not None:
            outputs = self.slots.addressed(outputs)
        for owner, outbox in self._outboxes.items():
            own = outputs if is_one_owners else outputs.of(owner)
            outbox.put_tokens(own.stream_ids, own.token_ids, own.logprobs, one_each=own.one_each)

    def put_ending(self, request: Request, outcome: FinishReason | BlockplaneError) -> None:
        """Put in a request's end, after which it has no slot any more."""
        if (reader := self.reader(request)) is not None:
            owner, stream_id = reader
            self._outboxes[owner].put_ending(Ending(stream_id, outcome, request.num_cached_tokens or 0))
        if self.slots is not None:
            self.slots.remove(request)

    def refuse(self, owner: int, stream_ids: Collection[int], error: BlockplaneError) -> None:
        """End streams that no request is behind."""
        for stream_id in stream_ids:
            self._outboxes[owner].put_ending(Ending(stream_id, error))

    def put_serving(self, serving: ServingState) -> None:
        for outbox in self._outboxes.values():
            outbox.put_serving(serving)

    def flush(self) -> None:
        for outbox in self._outboxes.values():
            outbox.flush()
