"""Which runner serves an attach: that of the last one with its KV and graphs, or a new one. Knows no streams."""

from collections.abc import Callable
from dataclasses import replace

from blockplane.data_plane.runner import Runner
from blockplane.protos.errors import ProtocolError
from blockplane.protos.plan import Configure


def runner_for(configure: Configure, kept: Runner | None, build: Callable[[Configure], Runner]) -> Runner:
    """The kept runner, reset, if it was built for the same; else one that `build` makes, which takes its place.

    Raises:
        ProtocolError: the engine counts on KV that is not there, or `build` refuses. `kept` may then lack its KV, and
            must not be used any more.
    """
    if kept is not None and _built(kept.configure) == _built(configure):
        kept.reset(configure)
        return kept
    if configure.keeps_kv:
        what = "another layout of it" if kept is not None else "none"
        raise ProtocolError(
            f"the engine counts on KV from an earlier attach, and this worker has {what}; let the engine configure it"
            " without keeps_kv."
        )
    return build(configure)


def _built(configure: Configure) -> Configure:
    """What of a configuration is built, without what differs from attach to attach."""
    return replace(configure, epoch=0, keeps_kv=False, last_step=0, heartbeat_milliseconds=0)
