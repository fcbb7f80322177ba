"""Each rule of kernel source catches what it is for, what the guide shows passes, and so do our own kernels."""

from pathlib import Path

import pytest

from nki_machine.lint import check_folder, findings, is_kernel_source
from nki_machine.lint_rules import RULES

KERNELS = Path(__file__).parents[2] / "kernels" / "nki"
HEAD = "import nki\nimport nki.isa as nisa\nimport nki.language as nl\n"

IN_A_KERNEL = {
    "keyword-only": "def helper(x, *, flag=True):\n    pass",
    "identity": "def helper(x):\n    return x is None",
    "list default": "def helper(x, stride=[1, 1]):\n    pass",
    "string buffer": "def helper(x):\n    return nl.ndarray((128, 4), nl.int32, buffer='sbuf')",
    "integer enum": "def helper(a, b):\n    nisa.dma_copy(dst=a, src=b, oob_mode=1)",
    "neuronxcc": "import neuronxcc.nki.isa",
    "jit settings": "@nki.jit(mode='torchxla')\ndef kernel(x):\n    return x",
    "scalar power": "def helper(x):\n    return nl.power(x, 2)",
    "plain matmul": "def helper(x, y):\n    return nl.matmul(x, y)",
    "register while": "def helper(reg):\n    while reg:\n        pass",
    "loop result": "def helper(reg):\n    def body(i):\n        return i\n    nl.fori_loop(0, reg, body)",
    "ordered loop": "def helper(reg, body):\n    with nl.no_reorder():\n        nl.fori_loop(0, reg, body)",
    "nested kernel": "@nki.jit\ndef inner(x):\n    return x\n@nki.jit\ndef outer(x):\n    return inner(x)",
    "dictionary key": "def helper():\n    return {1: 2}",
    "wide integer": "def helper():\n    return 4294967296",
    "odd value": "def helper():\n    return b'x'",
    "class": "class Tile:\n    pass",
    "mutable global": "STATE = [0]",
    "rebound global": "STEP = 1\nSTEP = 2",
    "variadic": "def helper(*tiles):\n    pass",
    "decorator": "import functools\n@functools.cache\ndef helper(x):\n    return x",
    "with": "def helper(x):\n    with x:\n        pass",
    "loop else": "def helper():\n    for i in range(3):\n        pass\n    else:\n        pass",
    "builtin": "def helper(xs):\n    return sorted(xs)",
    "lambda": "def helper(xs):\n    return lambda x: x",
    "comprehension": "def helper(xs):\n    return [x for x in xs]",
    "try": "def helper(x):\n    try:\n        x.a\n    finally:\n        pass",
    "raise": "def helper(x):\n    raise x",
    "yield": "def helper(x):\n    yield x",
    "async": "def outer():\n    async def helper(x):\n        pass",
    "walrus": "def helper(x):\n    return (y := x)",
    "global": "def helper(x):\n    def body(i):\n        nonlocal x\n    return body",
    "star": "def helper(x, y):\n    return x.permute(*y)",
    "match": "def helper(x):\n    match x:\n        case 1:\n            pass",
    "delete": "def helper(x):\n    del x",
    "set": "def helper():\n    return {1}",
    "import in a function": "def helper():\n    import math",
    "matrix operator": "def helper(x, y):\n    return x @ y",
    "removed isa.tensor_copy_dynamic_src": "def helper(x):\n    nisa.tensor_copy_dynamic_src(x, x)",
    "removed isa.tensor_copy_dynamic_dst": "def helper(x):\n    nisa.tensor_copy_dynamic_dst(x, x)",
    "removed language.arange": "def helper():\n    return nl.arange(4)",
    "removed language.mgrid": "def helper():\n    return nl.mgrid[0:4]",
    "removed language.par_dim": "def helper():\n    return nl.par_dim(128)",
    "deprecated language.affine_range": "def helper():\n    for i in nl.affine_range(4):\n        pass",
    "deprecated language.sequential_range": "def helper():\n    for i in nl.sequential_range(4):\n        pass",
    "deprecated language.static_range": "def helper():\n    for i in nl.static_range(4):\n        pass",
    "deprecated language.dynamic_range": "def helper(reg):\n    for i in nl.dynamic_range(reg):\n        pass",
    "deprecated language.tile_size.total_available_sbuf_size": "SIZE = nl.tile_size.total_available_sbuf_size",
    "no instruction language.divide": "def helper(x, y):\n    nisa.tensor_tensor(x, x, y, nl.divide)",
    "no instruction language.mod": "def helper(x, y):\n    nisa.tensor_tensor(x, x, y, op=nl.mod)",
    "no instruction language.fmod": "def helper(x, y):\n    nisa.tensor_tensor(x, x, y, op=nl.fmod)",
    "removed argument mask": "def helper(x, m):\n    nisa.tensor_copy(x, x, mask=m)",
    "removed argument dst_rmw_op": "def helper(x):\n    nisa.dma_copy(x, x, dst_rmw_op=nl.add)",
    "removed argument use_gpsimd_dma": "def helper(x):\n    nisa.sendrecv(x, x, 1, 1, 0, use_gpsimd_dma=True)",
    "removed argument imm": "def helper(r):\n    nisa.register_move(r, imm=42)",
}

FROM_THE_GUIDE = """
from dataclasses import dataclass

LIMIT = -3.4028235e38
SHAPE = (128, 512)

@dataclass
class Tile(nl.NKIObject):
    x: int
    y: bool = False

def scale(dst, src, factor: float = 0.5) -> None:
    nisa.tensor_scalar(dst=dst, data=src, op0=nl.multiply, operand0=factor)

@nki.jit
def kernel(a_input, count, stride=(1, 1)):
    assert a_input.shape[0] <= nl.tile_size.pmax, f"{a_input.shape} is too tall"
    print(f"adding tensors of type {a_input.dtype}")
    names = {"a": 1}
    tiles = []
    for i in range(4):
        tile = nl.ndarray(SHAPE, dtype=nl.float16, buffer=nl.sbuf, name=f"tile_{i}")
        nisa.dma_copy(dst=tile, src=a_input[i * 128 : (i + 1) * 128, :], oob_mode=nisa.oob_mode.skip)
        if i % 2 == 0 and a_input.dtype != nl.int32:
            scale(tile, tile)
        tiles.append(tile if i < 3 else tile[:, ::2])
    x = 0
    while x < 10:
        x += 1
    with nl.no_reorder():
        nisa.memset(tiles[0], 0.0)
    reg = nisa.register_alloc()
    nisa.register_load(reg, count)

    def body(i):
        nisa.tensor_tensor(tiles[0], tiles[0], tiles[1], nl.add)

    nl.fori_loop(0, reg, body)
    return tiles[0]
"""


@pytest.mark.parametrize("rule", sorted(IN_A_KERNEL))
def test_a_rule_catches_what_it_is_for_and_nothing_else_does(rule: str) -> None:
    assert {finding.rule for finding in findings(HEAD + IN_A_KERNEL[rule], RULES)} == {rule}


def test_every_rule_has_an_example_and_a_source() -> None:
    assert sorted(rule.name for rule in RULES) == sorted(IN_A_KERNEL)
    assert all(rule.source for rule in RULES)


def test_what_the_language_guide_shows_passes() -> None:
    assert findings(HEAD + FROM_THE_GUIDE, RULES) == []


def test_a_finding_names_the_line_and_what_to_write_instead() -> None:
    (finding,) = findings(HEAD + IN_A_KERNEL["identity"], RULES)
    assert str(finding) == "line 5: identity: is and is not are not parsed; use == and != (migration 0.3)"


def test_a_name_is_known_by_what_it_was_imported_as() -> None:
    source = "from nki import language as words\nfrom nki.language import divide\n"
    found = findings(f"{source}def helper(x):\n    return divide, words.mod", RULES)
    assert [finding.rule for finding in found] == ["no instruction language.divide", "no instruction language.mod"]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import nki.isa as nisa", True),
        ("from nki import language as nl", True),
        ("import neuronxcc.nki as nki", True),
        ("import torch\nfrom blockplane.kernels.nki import layout", False),
    ],
)
def test_host_code_is_left_alone(source: str, expected: bool) -> None:
    assert is_kernel_source(source) == expected


def test_our_kernels_pass() -> None:
    found = check_folder(KERNELS, RULES)
    assert found
    assert {name: [str(each) for each in files] for name, files in found.items() if files} == {}
