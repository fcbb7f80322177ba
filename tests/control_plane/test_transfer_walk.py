"""Random walks over requests that move between workers: short ones in the gate, long ones among the slow tests."""

import asyncio
import random

import pytest
from moving_walk import MovingWalk, random_operation


def walk(seed: int, num_operations: int) -> MovingWalk:
    async def main() -> MovingWalk:
        rng = random.Random(seed)
        steps = MovingWalk(rng)
        for _ in range(num_operations):
            getattr(steps, random_operation(rng))()
        steps.settle()
        return steps

    return asyncio.run(main())


@pytest.mark.parametrize("seed", range(16))
def test_whatever_becomes_of_a_move_texts_are_right_and_no_block_is_lost(seed: int) -> None:
    walk(seed, num_operations=160)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1060))
def test_it_holds_for_tens_of_thousands_of_operations(seed: int) -> None:
    walk(seed, num_operations=1500)


def test_the_walks_move_blocks_and_fail_to() -> None:
    """Or they would prove little."""
    walks = [walk(seed, num_operations=150) for seed in range(6)]
    assert sum(each.transfers.num_transferred_blocks for each in walks) > 60
    assert sum(each.transfers.num_transfers for each in walks) > 20
    assert sum(each.transfers.num_failed_transfers for each in walks) > 2
    assert max(each.most_leased for each in walks) > 10
