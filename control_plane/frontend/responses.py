"""What a sample gained as a message of `blockplane.v1.Inference`; knows neither streams nor calls."""

from collections.abc import Iterator

from blockplane.control_plane.frontend.delta import Delta
from blockplane.protos.delivery_wire import FINISH_REASON_TO_PROTO
from blockplane.protos.logprobs import Logprobs
from blockplane.v1 import inference_pb2 as pb


def response_of(request_id: str, index: int, delta: Delta) -> pb.GenerateResponse | None:
    """A message of sample `index`; None where there is only an error to tell, which is for the call's status."""
    token_ids, text, logprobs, prompt_logprobs, outcome, usage, _ = delta
    if outcome is not None and not isinstance(outcome, str) and not token_ids and prompt_logprobs is None:
        return None
    response = pb.GenerateResponse(request_id=request_id, token_ids=token_ids, text=text, sample_index=index)
    if logprobs is not None:
        response.logprobs.extend(_told(logprobs))
    if prompt_logprobs is not None:
        response.prompt_logprobs.extend(_told(prompt_logprobs))
    if usage is not None and isinstance(outcome, str):
        response.finish_reason = FINISH_REASON_TO_PROTO[outcome]
        response.usage.CopyFrom(pb.Usage(**usage._asdict()))
    return response


def _told(logprobs: Logprobs) -> Iterator[pb.TokenLogprobs]:
    for token_ids, values in logprobs.by_token():
        yield pb.TokenLogprobs(
            token_id=token_ids[0], logprob=values[0], top_token_ids=token_ids[1:], top_logprobs=values[1:]
        )
