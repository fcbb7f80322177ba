"""Which of several groups is to take a request: the rule by itself. Knows neither groups nor requests."""

from collections.abc import Sequence
from typing import NamedTuple

SLACK_SHARE = 8


class Candidate(NamedTuple):
    """A group that may take a request.

    Attributes:
        num_shared: leading tokens of the request that it need not compute for it.
        load: tokens that are left to compute for those that it has.
        num_coming: of those that it shares, tokens that are not computed yet: its load contains them.
        last_turn: when it was last chosen for nothing that it shares, as a number that grows; 0 = never.
    """

    num_shared: int
    load: int
    num_coming: int = 0
    last_turn: int = 0


def in_order_of_choice(candidates: Sequence[Candidate], num_tokens: int, max_imbalance_percent: int) -> list[int]:
    """The indices of candidates for a request of so many tokens, the best first.

    The one that shares most is the best, unless its load is above the mean by more than `max_imbalance_percent` and a
    slack: then it comes after all that are not, so that a prefix which one group cannot serve alone is computed at a
    second one instead of queueing, and is served by both from then on. The load is what is left to compute: what is
    cached costs nobody time, and what others compute of the request's own tokens is no reason against a group, for
    elsewhere it would be computed too. The slack is an eighth of what the candidate shares: a percentage of next to
    nothing would send a second request away from the prefix of the first, and the more there is to be computed
    elsewhere the more a wait here is worth; not all of it, for then a prefix that all ask for would fill one group
    alone.

    Of those that share equally much, the one of the least load is the best. Where they differ by no more than the slack
    it is the first of them: so once a prefix is asked for less, it is asked for at one group alone, and the others'
    copies go as caches do. Those that share nothing take turns within an eighth of the request's own tokens, so that
    prefixes which come one after the other get homes everywhere.
    """
    allowed = sum(candidate.load for candidate in candidates) / len(candidates) * (1 + max_imbalance_percent / 100)
    lightest: dict[int, int] = {}
    for num_shared, load, *_ in candidates:
        lightest[num_shared] = min(load, lightest.get(num_shared, load))

    def rank(index: int) -> tuple[bool, int, int, int, int]:
        num_shared, load, num_coming, last_turn = candidates[index]
        slack = (num_shared or num_tokens) // SLACK_SHARE
        if load - num_coming > allowed + slack:
            return True, 0, load, 0, index
        excess = max(0, load - lightest[num_shared] - slack)
        return False, -num_shared, excess, 0 if num_shared else last_turn, index

    return sorted(range(len(candidates)), key=rank)
