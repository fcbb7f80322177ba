"""The block table against a list of lists: growing, moving, and what a step reads of it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockplane.data_plane.block_table import BlockTable

NUM_GROUPS, NUM_ROWS, WIDTH = 2, 4, 6


class Lists:
    """The same table as block ids [row][logical block][group]."""

    def __init__(self) -> None:
        self.rows: list[list[tuple[int, ...]]] = [[] for _ in range(NUM_ROWS)]

    def block_ids(self) -> list[list[list[int]]]:
        return [
            [[block[group] for block in row] + [0] * (WIDTH - len(row)) for row in self.rows]
            for group in range(NUM_GROUPS)
        ]


ROW = st.integers(0, NUM_ROWS - 1)
BLOCK = st.tuples(*[st.integers(0, 99)] * NUM_GROUPS)
OPERATIONS = st.one_of(
    st.tuples(st.just("append"), st.lists(st.tuples(ROW, BLOCK), min_size=1, max_size=5)),
    st.tuples(st.just("add_row"), ROW, st.lists(BLOCK, max_size=WIDTH)),
    st.tuples(st.just("clear_row"), ROW),
    st.tuples(st.just("move_row"), ROW, ROW),
    st.tuples(st.just("swap_row"), ROW, ROW),
)


def columns(blocks: list[tuple[int, ...]]) -> np.ndarray:
    return np.array(blocks, np.int32).reshape(-1, NUM_GROUPS).T


def operate(table: BlockTable, lists: Lists, name: str, *arguments: object) -> None:
    rows = lists.rows
    match name, *arguments:
        case "append", [*blocks]:
            blocks = [(row, block) for row, block in blocks if len(rows[row]) + len(blocks) <= WIDTH]
            if blocks:
                table.append(np.array([row for row, _ in blocks]), columns([block for _, block in blocks]))
            for row, block in blocks:
                rows[row].append(block)
        case "add_row", row, [*blocks]:
            table.add_row(row, columns(blocks))
            rows[row] = blocks
        case "clear_row", row:
            table.clear_row(row)
            rows[row] = []
        case "move_row", source, target:
            table.move_row(source, target)
            rows[target], rows[source] = rows[source], rows[target] if source == target else []
        case "swap_row", row, other:
            table.swap_row(row, other)
            rows[row], rows[other] = rows[other], rows[row]


@given(st.lists(OPERATIONS, max_size=12), st.permutations(range(NUM_ROWS)), st.integers(0, NUM_ROWS), st.integers(1, 9))
def test_after_any_operations_the_table_holds_and_yields_what_lists_hold(
    operations: list[tuple[object, ...]], order: list[int], num_chosen: int, width: int
) -> None:
    table, lists = BlockTable(NUM_GROUPS, NUM_ROWS, WIDTH), Lists()
    for operation in operations:
        operate(table, lists, *operation)
    assert table.block_ids.tolist() == lists.block_ids()
    assert table.num_blocks.tolist() == [len(row) for row in lists.rows]
    chosen = order[:num_chosen]
    gathered = table.gather(np.array(chosen, np.int32), NUM_ROWS + 1, width)
    assert gathered.dtype == np.int32
    assert gathered.flags.c_contiguous, "all groups go to the device in one copy"
    expected = [
        [[(block or -1) for block in (lists.block_ids()[group][row] + [0] * width)[:width]] for row in chosen]
        + [[-1] * width] * (NUM_ROWS + 1 - num_chosen)
        for group in range(NUM_GROUPS)
    ]
    assert gathered.tolist() == expected


def test_a_row_without_room_takes_nothing_and_changes_nothing() -> None:
    table = BlockTable(1, 2, 2)
    table.add_row(0, np.array([[5, 6]], np.int32))
    for rows in ([1, 0], [1, 1, 1], [2]):
        with pytest.raises(IndexError):
            table.append(np.array(rows), np.full((1, len(rows)), 9, np.int32))
        assert table.block_ids.tolist() == [[[5, 6], [0, 0]]]
        assert table.num_blocks.tolist() == [2, 0]


def test_a_kernel_s_smaller_blocks_are_parts_of_ours_and_what_is_skipped_stays_so() -> None:
    table = BlockTable(2, 1, 3, block_size=6, kernel_block_size=2)
    table.add_row(0, np.array([[4, 0], [1, 2]], np.int32))
    assert table.gather(np.array([0]), 2, 2).tolist() == [
        [[12, 13, 14, -1, -1, -1], [-1] * 6],
        [[3, 4, 5, 6, 7, 8], [-1] * 6],
    ]


def test_tails_begin_where_each_row_s_does_and_hold_nothing_behind_the_table_s_end() -> None:
    table = BlockTable(2, 3, 4)
    for row in range(3):
        table.add_row(row, np.arange(8, dtype=np.int32).reshape(2, 4) + 10 * (row + 1))
    tails = table.gather_tails(1, np.array([2, 0]), 3, np.array([1, 3]), 3)
    assert tails.dtype == np.int32
    assert tails.tolist() == [[35, 36, 37], [17, -1, -1], [-1, -1, -1]]


def test_only_the_groups_that_are_asked_for_are_gathered() -> None:
    table = BlockTable(3, 1, 2)
    table.add_row(0, np.array([[4, 5], [6, 7], [8, 9]], np.int32))
    assert table.gather(np.array([0]), 1, 2, [0, 2]).tolist() == [[[4, 5]], [[8, 9]]]
    assert table.gather(np.array([0]), 1, 2, []).shape == (0, 1, 2)
