"""Buckets, the compiled shapes: how one is chosen and what a list of them must be; knows no backend."""

from bisect import bisect_left
from itertools import pairwise

from blockplane.protos.errors import ConfigurationError


def choose_bucket(num_items: int, buckets: tuple[int, ...]) -> int | None:
    """The smallest bucket that holds `num_items`, or None where none does (seed 000, "Decode Batch Padding")."""
    index = bisect_left(buckets, num_items)
    return buckets[index] if index < len(buckets) else None


def check_buckets(name: str, buckets: tuple[int, ...]) -> None:
    """Raise ConfigurationError unless `buckets` are positive and strictly ascending."""
    if not buckets or buckets[0] < 1 or any(low >= high for low, high in pairwise(buckets)):
        raise ConfigurationError(f"{name} is {list(buckets)}; give positive sizes in ascending order, such as 1,2,4,8.")
