"""The rules of kernel source, each with where it is said; knows how to find a breach in a tree, and no kernel.

Sources, by their paths in the public repository aws-neuron/aws-neuron-sdk (release 2.32): `migration` is
nki/migration/index.rst, `guide` is nki/get-started/nki-language-guide.rst, `notes` is release-notes/components/nki.rst,
`stubs` is nki/api/nki. "inferred" means that no document forbids it, but that the guide's list of constructs (if, for
over ranges, lists and tuples, while, functions, simple classes) does not have it and that none of the 174 files of
aws-neuron/nki-library (2026-04-13) uses it in a kernel. The reverse holds too: that library says `is` 240 times, which
the migration guide forbids; the document wins.
"""

from __future__ import annotations

import ast
import itertools
from typing import TYPE_CHECKING

from nki_machine.lint import Rule, Source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

INFERRED = "inferred"
NL, NISA = "nki.language", "nki.isa"

REMOVED = {
    f"{NISA}.tensor_copy_dynamic_src": "use tensor_copy with .ap(scalar_offset=); migration 0.4",
    f"{NISA}.tensor_copy_dynamic_dst": "use tensor_copy with .ap(scalar_offset=); migration 0.4",
    f"{NL}.arange": "use slices or .ap; migration 0.2",
    f"{NL}.mgrid": "use slices or .ap; migration 0.2",
    f"{NL}.par_dim": "the first dimension is the partition; migration, block dimensions",
}
DEPRECATED = {
    f"{NL}.affine_range": "use range; stubs",
    f"{NL}.sequential_range": "use range; stubs",
    f"{NL}.static_range": "use range; stubs",
    f"{NL}.dynamic_range": "use nl.fori_loop; migration 0.6",
    f"{NL}.tile_size.total_available_sbuf_size": "use tile_size.sbuf_fmax_bytes; migration 0.4",
}
NO_INSTRUCTION = {
    f"{NL}.divide": "multiply by the reciprocal; notes 0.3",
    f"{NL}.mod": "there is no such instruction; notes 0.3",
    f"{NL}.fmod": "there is no such instruction; notes 0.3",
}
REMOVED_KEYWORDS = {
    "mask": "slice instead; migration 0.2",
    "dst_rmw_op": "use dma_compute; migration 0.3",
    "use_gpsimd_dma": "use dma_engine=; migration 0.3",
    "imm": "register_move takes src=; migration 0.3",
}
ENUM_KEYWORDS = {"engine", "dge_mode", "oob_mode", "reduce_cmd", "perf_mode", "dma_engine"}
BUILTINS = {
    *("range", "len", "min", "max", "tuple", "list", "dict", "str", "int", "float", "bool", "slice", "print"),
    *("divmod", "isinstance", "abs"),
}
"""Those that the guide or the migration guide shows, or that a kernel of nki-library calls."""
PYTHON_BUILTINS = set(dir(__builtins__)) if not isinstance(__builtins__, dict) else set(__builtins__)
UNKNOWN_STATEMENTS: tuple[tuple[str, tuple[type[ast.AST], ...], str], ...] = (
    ("lambda", (ast.Lambda,), "name the function with def"),
    ("comprehension", (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp), "write the loop out"),
    ("try", (ast.Try, ast.TryStar), "nothing is raised on a device; assert what must hold"),
    ("raise", (ast.Raise,), "assert instead"),
    ("yield", (ast.Yield, ast.YieldFrom), "append to a list"),
    ("async", (ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith, ast.Await), "engines overlap without it"),
    ("walrus", (ast.NamedExpr,), "assign on a line of its own"),
    ("global", (ast.Global, ast.Nonlocal), "kernels are cached by their arguments; carry state in tensors"),
    ("star", (ast.Starred,), "write the elements out"),
    ("match", (ast.Match,), "use if and elif"),
    ("delete", (ast.Delete,), "let the name go out of use"),
    ("set", (ast.Set,), "use a tuple"),
    ("import in a function", (ast.Import, ast.ImportFrom), "import at the top"),
    ("matrix operator", (ast.MatMult,), "call nisa.nc_matmul"),
)


def anywhere(matches: Callable[[Source, ast.AST], bool]) -> Callable[[Source], Iterator[ast.AST]]:
    return lambda source: (node for node in ast.walk(source.tree) if matches(source, node))


def in_functions(matches: Callable[[Source, ast.AST], bool]) -> Callable[[Source], Iterator[ast.AST]]:
    return lambda source: (node for node in source.inside if matches(source, node))


def of_types(types: tuple[type[ast.AST], ...]) -> Callable[[Source], Iterator[ast.AST]]:
    return in_functions(lambda _, node: isinstance(node, types))


def named(name: str) -> Callable[[Source], Iterator[ast.AST]]:
    return anywhere(lambda source, node: isinstance(node, ast.Attribute | ast.Name) and source.name(node) == name)


def keyword(name: str) -> Callable[[Source], Iterator[ast.AST]]:
    """Calls of nki's own functions with such an argument."""
    return anywhere(
        lambda source, node: (
            isinstance(node, ast.Call)
            and source.name(node.func).startswith("nki.")
            and any(each.arg == name for each in node.keywords)
        )
    )


def _identity(_: Source, node: ast.AST) -> bool:
    return isinstance(node, ast.Compare) and any(isinstance(op, ast.Is | ast.IsNot) for op in node.ops)


def _keyword_only(_: Source, node: ast.AST) -> bool:
    return isinstance(node, ast.arguments) and bool(node.kwonlyargs)


def _variadic(_: Source, node: ast.AST) -> bool:
    is_parameters = isinstance(node, ast.arguments) and bool(node.vararg or node.kwarg or node.posonlyargs)
    return is_parameters or (isinstance(node, ast.Call) and any(each.arg is None for each in node.keywords))


def _mutable_default(_: Source, node: ast.AST) -> bool:
    kinds = ast.List | ast.Dict | ast.Set
    return isinstance(node, ast.arguments) and any(
        isinstance(default, kinds) for default in (*node.defaults, *node.kw_defaults)
    )


def _keywords(node: ast.AST) -> dict[str | None, ast.expr]:
    return {each.arg: each.value for each in node.keywords} if isinstance(node, ast.Call) else {}


def _is_constant(node: ast.AST | None, kind: type) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is kind


def _string_buffer(_: Source, node: ast.AST) -> bool:
    return _is_constant(_keywords(node).get("buffer"), str)


def _integer_enum(source: Source, node: ast.AST) -> bool:
    own = isinstance(node, ast.Call) and source.name(node.func).startswith(NISA)
    return own and any(name in ENUM_KEYWORDS and _is_constant(value, int) for name, value in _keywords(node).items())


def _neuronxcc(_: Source, node: ast.AST) -> bool:
    names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    return any(name.split(".")[0] == "neuronxcc" for name in names)


def _jit_settings(source: Source, node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and source.name(node.func) == "nki.jit"
        and bool({"mode", "platform_target"} & {each.arg for each in node.keywords})
    )


def _dictionary_key(_: Source, node: ast.AST) -> bool:
    return isinstance(node, ast.Dict) and any(not _is_constant(key, str) for key in node.keys)


def _wide_integer(_: Source, node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int and node.value >= 2**32


def _odd_value(_: Source, node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, bytes | complex)


def _odd_class(source: Source, node: ast.AST) -> bool:
    if not isinstance(node, ast.ClassDef):
        return False
    return [source.name(base) for base in node.bases] not in ([f"{NL}.NKIObject"], ["enum.Enum"])


def _odd_decorator(source: Source, node: ast.AST) -> bool:
    allowed = {"nki.jit"} if isinstance(node, ast.FunctionDef) else {"dataclasses.dataclass"}
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
    return any(source.decorator(each) not in allowed for each in decorators)


def _odd_with(source: Source, node: ast.AST) -> bool:
    return isinstance(node, ast.With) and any(
        source.decorator(item.context_expr) != f"{NL}.no_reorder" for item in node.items
    )


def _register_while(_: Source, node: ast.AST) -> bool:
    return isinstance(node, ast.While) and isinstance(node.test, ast.Name)


def _loop_else(_: Source, node: ast.AST) -> bool:
    return isinstance(node, ast.For | ast.While) and bool(node.orelse)


def _odd_builtin(source: Source, node: ast.AST) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        return False
    name = node.func.id
    return name in PYTHON_BUILTINS - BUILTINS and name not in source.aliases


def _scalar_power(source: Source, node: ast.AST) -> bool:
    if not (isinstance(node, ast.Call) and source.name(node.func) == f"{NL}.power"):
        return False
    return any(isinstance(argument, ast.Constant) for argument in node.args[:2])


def _plain_matmul(source: Source, node: ast.AST) -> bool:
    is_call = isinstance(node, ast.Call) and source.name(node.func) == f"{NL}.matmul"
    return is_call and getattr(_keywords(node).get("transpose_x"), "value", False) is not True


def _mutable_globals(source: Source) -> Iterator[ast.AST]:
    """Module-level values that are no constants; the names of functions, dtypes and buffers are."""
    for statement in source.tree.body:
        value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
        nodes = ast.walk(value) if value is not None else ()
        if any(isinstance(node, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp) for node in nodes):
            yield statement


def _rebound_globals(source: Source) -> Iterator[ast.AST]:
    names = [
        (target.id, statement)
        for statement in source.tree.body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name)
    ]
    counts = {name: sum(other == name for other, _ in names) for name, _ in names}
    return (statement for name, statement in names if counts[name] > 1)


def _loop_calls(source: Source, node: ast.AST) -> list[ast.Call]:
    loops = {f"{NL}.fori_loop", f"{NL}.while_loop"}
    return [each for each in ast.walk(node) if isinstance(each, ast.Call) and source.name(each.func) in loops]


def _returning_bodies(source: Source) -> Iterator[ast.AST]:
    """`return value` in what a fori_loop runs."""
    calls = [call for call in _loop_calls(source, source.tree) if source.name(call.func).endswith("fori_loop")]
    bodies = {argument.id for call in calls for argument in call.args[2:] if isinstance(argument, ast.Name)}
    for function in source.functions:
        if function.name in bodies:
            returns = (node for node in ast.walk(function) if isinstance(node, ast.Return))
            yield from (node for node in returns if node.value is not None)


def _loops_in_order(source: Source) -> Iterator[ast.AST]:
    blocks = (node for node in ast.walk(source.tree) if isinstance(node, ast.With))
    return itertools.chain.from_iterable(_loop_calls(source, block) for block in blocks)


def _called_kernels(source: Source) -> Iterator[ast.AST]:
    names = {kernel.name for kernel in source.kernels}
    return (
        node
        for node in source.inside
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names
    )


def _table(
    prefix: str, names: dict[str, str], find: Callable[[str], Callable[[Source], Iterable[ast.AST]]]
) -> list[Rule]:
    """A rule for each name; the text is what to do, then the source."""
    rules = []
    for name, text in names.items():
        instead, _, source = text.rpartition("; ")
        rules.append(Rule(f"{prefix} {name.removeprefix('nki.')}", instead, source, find(name)))
    return rules


RULES: tuple[Rule, ...] = (
    Rule(
        "keyword-only",
        "the * separator is not parsed; order the parameters",
        "migration 0.3",
        in_functions(_keyword_only),
    ),
    Rule("identity", "is and is not are not parsed; use == and !=", "migration 0.3", in_functions(_identity)),
    Rule("list default", "a kernel takes tuples, not lists", "migration 0.3", in_functions(_mutable_default)),
    Rule("string buffer", "name the buffer's object, such as nl.sbuf", "migration 0.3", anywhere(_string_buffer)),
    Rule("integer enum", "name the member, such as nisa.oob_mode.skip", "migration 0.3", anywhere(_integer_enum)),
    Rule("neuronxcc", "import nki", "migration 0.4", anywhere(_neuronxcc)),
    Rule("jit settings", "set NEURON_PLATFORM_TARGET_OVERRIDE instead", "migration 0.3", anywhere(_jit_settings)),
    Rule("scalar power", "the exponent must be a tile", "notes 0.3", anywhere(_scalar_power)),
    Rule("plain matmul", "pass transpose_x=True", "notes 0.3", anywhere(_plain_matmul)),
    Rule("register while", "use nl.while_loop", "migration 0.6", in_functions(_register_while)),
    Rule("loop result", "a fori_loop's body returns nothing", "migration 0.6", _returning_bodies),
    Rule("ordered loop", "put no_reorder into the loop's body", "migration 0.6", _loops_in_order),
    Rule("nested kernel", "undecorate it, or call nki.jit at the outer call", "migration 0.2", _called_kernels),
    Rule("dictionary key", "keys are strings", "guide, NKI Values", in_functions(_dictionary_key)),
    Rule("wide integer", "integers have 32 bits", "guide, NKI Values", in_functions(_wide_integer)),
    Rule("odd value", "NKI has no bytes and no complex numbers", "guide, NKI Values", in_functions(_odd_value)),
    Rule("class", "inherit from nl.NKIObject alone", "guide, Class Support", anywhere(_odd_class)),
    Rule("mutable global", "kernels are cached by their arguments alone", "guide, Kernel Caching", _mutable_globals),
    Rule("rebound global", "kernels are cached by their arguments alone", "guide, Kernel Caching", _rebound_globals),
    Rule("variadic", "name every parameter and argument", INFERRED, in_functions(_variadic)),
    Rule("decorator", "only nki.jit, and dataclass on classes", INFERRED, anywhere(_odd_decorator)),
    Rule("with", "only nl.no_reorder", INFERRED, in_functions(_odd_with)),
    Rule("loop else", "put it behind the loop", INFERRED, in_functions(_loop_else)),
    Rule("builtin", "use what the guide shows", INFERRED, in_functions(_odd_builtin)),
    *(Rule(name, instead, INFERRED, of_types(types)) for name, types, instead in UNKNOWN_STATEMENTS),
    *_table("removed", REMOVED, named),
    *_table("deprecated", DEPRECATED, named),
    *_table("no instruction", NO_INSTRUCTION, named),
    *_table("removed argument", REMOVED_KEYWORDS, keyword),
)
