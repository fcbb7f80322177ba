"""Which FP8 numbers a cache's bytes are on which generation, and how wide they reach; knows no cache and no kernel.

Trn2 computes in `float8_e4m3`, whose greatest number is 240, Trn3 also in OCP's `float8_e4m3fn`, up to 448. Numbers up
to 240 have the same bits in both; greater ones and NaN have not, so a cache is read by the generation that wrote it.
"""

import nki.isa as nisa
import nki.language as nl

GREATEST_OF_TRN2, GREATEST_OF_TRN3 = 240.0, 448.0


def as_numbers(cache: nl.NkiTensor) -> nl.NkiTensor:
    """A cache of bytes (uint8) as the FP8 that this generation reads; any other cache as it is."""
    if cache.dtype != nl.uint8:
        return cache
    if nisa.get_nc_version() == nisa.nc_version.gen3:
        return cache.view(nl.float8_e4m3)
    return cache.view(nl.float8_e4m3fn)


def greatest() -> float:
    """The greatest FP8 number of this generation."""
    if nisa.get_nc_version() == nisa.nc_version.gen3:
        return GREATEST_OF_TRN2
    return GREATEST_OF_TRN3
