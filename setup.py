"""Builds the C++ kernels, a library for each set of instructions; pyproject.toml says everything else."""

from glob import glob

from setuptools import Extension, setup

VARIANTS = {
    "_avx2": ["-mavx2", "-mfma", "-mf16c"],
    "_avx512": ["-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"],
    "_amx": ["-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mamx-tile", "-mamx-bf16"],
}
FLAGS = [
    "-O3",
    "-std=c++20",
    "-pthread",
    "-fno-math-errno",
    # Else variants that one process loads, as tests do, would share what is static in their functions.
    "-fno-gnu-unique",
    # GCC 12 is wrong here, in its own headers (GCC bug 105593).
    "-Wno-maybe-uninitialized",
    "-Wno-uninitialized",
]

setup(
    ext_modules=[
        Extension(
            f"blockplane.kernels.native.{name}",
            sources=sorted(glob("kernels/native/*.cpp")),
            depends=sorted(glob("kernels/native/*.h")),
            extra_compile_args=[*FLAGS, *instructions],
            extra_link_args=["-pthread"],
            language="c++",
            # Without a compiler, or on another kind of CPU, torch computes.
            optional=True,
        )
        for name, instructions in VARIANTS.items()
    ]
)
