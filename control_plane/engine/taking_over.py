"""Which worker group may go on with what another has computed: the rules by themselves. Knows no transfer."""

from blockplane.control_plane.engine.group import WorkerGroup
from blockplane.control_plane.engine.request import Request
from blockplane.protos.errors import CapacityError, InvalidRequestError


def can_take(target: WorkerGroup, source: WorkerGroup) -> bool:
    """Whether a group goes on with what another has computed."""
    ours, theirs = target.scheduler.blocks, source.scheduler.blocks
    return (
        target.hello.takes_decodes
        and target.hello.has_weights_of(source.hello)
        and ours.has_keys_of(theirs)
        and len(target.ranks) == len(source.hello.transfer_addresses)
        and target.hello.transport_from(source.hello) is not None
    )


def has_what_moves(request: Request) -> bool:
    """Whether a request finds its blocks elsewhere; one that shares none, or is told of its prompt, never looks."""
    return bool(request.keys) and request.params.prompt_logprobs is None


def fits(group: WorkerGroup, request: Request) -> bool:
    """Whether a group could serve a request, were it empty."""
    try:
        group.scheduler.check_fit(request)
    except (CapacityError, InvalidRequestError):
        return False
    return group.can_serve(request)
