"""What nearly every small kernel of these tests begins and ends with; knows no instruction but the copy."""

import nki.isa as nisa
import nki.language as nl


def loaded(tensor):
    """A tile in SBUF with the tensor's content."""
    tile = nl.ndarray(tensor.shape, dtype=tensor.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=tensor)
    return tile


def stored(tile):
    """A result in HBM with the tile's content."""
    result = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=result, src=tile)
    return result


def sbuf(shape, dtype):
    return nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
