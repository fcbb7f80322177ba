"""What is kept from one attach to the next, where others have a say in it."""

from dataclasses import replace

import pytest
import torch
from scripted_attaches import CONFIGURE
from torch import Tensor

from blockplane.data_plane.kept_runner import KeptRunner
from blockplane.data_plane.models.synthetic import SyntheticModel, synthetic_model_info
from blockplane.data_plane.ranks.collectives import Alone
from blockplane.protos.errors import ProtocolError


class WithAnother(Alone):
    """Rank 0 of two, the other of which says whether it has what it had."""

    world_size = 2

    def __init__(self) -> None:
        self.other_has_kept = True

    def all_reduce(self, x: Tensor) -> Tensor:
        return x + int(self.other_has_kept)


def test_a_rank_keeps_what_it_built_only_where_the_others_have_theirs() -> None:
    ranks = WithAnother()
    kept = KeptRunner(SyntheticModel("float32"), synthetic_model_info(64), 0, None, ranks=ranks)
    with torch.inference_mode():
        first = kept.configured(CONFIGURE)
        assert kept.configured(CONFIGURE) is first
        ranks.other_has_kept = False
        second = kept.configured(CONFIGURE)
        assert second is not first
        with pytest.raises(ProtocolError, match="another rank has none"):
            kept.configured(replace(CONFIGURE, keeps_kv=True))
