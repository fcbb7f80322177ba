"""The operators that instructions take, in numpy: one table, which `nki.language` offers by name. Knows no instruction.

The names, families and legal reductions follow the table "Supported Math Operators by NKI ISA" and the valid input
ranges "Supported Activation Functions by NKI ISA" of the public documentation (nki.api.shared, NKI 0.6.0).
Where an engine approximates by polynomials numpy computes to float32: results agree within the engine's error only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from nki_machine.errors import RuleError

Unary = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """An operator or an activation function, as an instruction takes it.

    AWS's `nl.add` is also a function of tiles. This emulator has instructions only, hence refuses the call.

    Attributes:
        family: "arithmetic" (float32 in, float32 out), "bitvec" (unsigned integers of one width), "power" (arithmetic
            of two tiles on the GpSimd Engine alone), "activation" (of the Scalar Engine alone), "average" (a reduction
            over partitions alone), or "refused" (a name of `nki.language` that no engine computes).
        num_inputs: 1 or 2. apply: on as many arrays; None if no engine but the Scalar Engine computes it.
        reduction: folds the trailing axis of an array; None if the operator is no legal reduction.
        identity: what a reduction starts from.
        activation: what the Scalar Engine computes under this name; None if it does not.
        min_generation: the first NeuronCore that has it (3 is Trn2, 4 is Trn3).
    """

    name: str
    family: str
    num_inputs: int = 2
    apply: Callable[..., np.ndarray] | None = None
    reduction: Unary | None = None
    identity: float | None = None
    activation: Unary | None = None
    min_generation: int = 3

    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise RuleError(
            f"nl.{self.name} on tiles is not emulated: call an instruction of nki.isa and pass nl.{self.name}."
        )

    def __repr__(self) -> str:
        return f"nl.{self.name}"

    def require(self, generation: int) -> None:
        """RuleError if this NeuronCore cannot compute it."""
        if self.family == "refused":
            raise RuleError(f"{self} is computed by no engine; use nisa.reciprocal and nl.multiply, or integer masks.")
        if generation < self.min_generation:
            raise RuleError(f"{self} needs NeuronCore-v{self.min_generation} and this one is v{generation}.")


def _as_float(predicate: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    def compare(*values: np.ndarray) -> np.ndarray:
        return predicate(*values).astype(np.float32)

    return compare


def _by_magnitude(further: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Callable[..., np.ndarray]:
    """Keeps the sign; a tie yields y."""
    return lambda x, y: np.where(further(np.abs(x), np.abs(y)), x, y)


def _folding(ufunc: np.ufunc) -> Unary:
    return lambda values: ufunc.reduce(values, axis=-1)


def _within(low: float, high: float, function: Unary, of_magnitude: bool = False) -> Unary:
    """NaN outside the valid input range, where the documentation promises only "invalid results"."""

    def guarded(values: np.ndarray) -> np.ndarray:
        measured = np.abs(values) if of_magnitude else values
        valid = (measured >= low) & (measured <= high)
        return np.where(valid, function(np.where(valid, values, np.float32(1))), np.float32(np.nan))

    return guarded


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.float32(1) / (np.float32(1) + np.exp(-x))


def _rsqrt(x: np.ndarray) -> np.ndarray:
    return np.float32(1) / np.sqrt(x)


def _relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, np.float32(0))


def _silu(x: np.ndarray) -> np.ndarray:
    return x * _sigmoid(x)


def _softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(x, np.float32(0))


def _mean(values: np.ndarray) -> np.ndarray:
    return values.mean(axis=-1, dtype=np.float32)


def _binary(name: str, ufunc: np.ufunc, identity: float | None = None, family: str = "arithmetic") -> Op:
    return Op(name, family, apply=ufunc, reduction=None if identity is None else _folding(ufunc), identity=identity)


def _comparison(name: str, ufunc: np.ufunc) -> Op:
    return Op(name, "arithmetic", apply=_as_float(ufunc))


def _logical(name: str, ufunc: np.ufunc, identity: float) -> Op:
    return Op(name, "arithmetic", apply=_as_float(ufunc), reduction=_as_float(_folding(ufunc)), identity=identity)


def _unary(name: str, function: Unary, activation: Unary | None = None) -> Op:
    return Op(name, "arithmetic", num_inputs=1, apply=function, activation=activation or function)


def _activation(name: str, function: Unary) -> Op:
    return Op(name, "activation", num_inputs=1, activation=function)


_TABLE = (
    _binary("bitwise_and", np.bitwise_and, identity=-1, family="bitvec"),
    _binary("bitwise_or", np.bitwise_or, identity=0, family="bitvec"),
    _binary("bitwise_xor", np.bitwise_xor, identity=0, family="bitvec"),
    # Both shifts are logical: bits are unsigned when they arrive.
    _binary("left_shift", np.left_shift, family="bitvec"),
    _binary("right_shift", np.right_shift, family="bitvec"),
    Op("invert", "bitvec", num_inputs=1, apply=np.invert),
    _binary("add", np.add, identity=0.0),
    _binary("multiply", np.multiply, identity=1.0),
    _binary("maximum", np.maximum, identity=-np.inf),
    _binary("minimum", np.minimum, identity=np.inf),
    # A legal reduction by the table, which does not say of what; it is not emulated.
    _binary("subtract", np.subtract),
    _binary("power", np.power, family="power"),
    Op("abs_max", "arithmetic", apply=_by_magnitude(np.greater), min_generation=4),
    Op("abs_min", "arithmetic", apply=_by_magnitude(np.less), min_generation=4),
    _comparison("equal", np.equal),
    _comparison("not_equal", np.not_equal),
    _comparison("less", np.less),
    _comparison("less_equal", np.less_equal),
    _comparison("greater", np.greater),
    _comparison("greater_equal", np.greater_equal),
    _logical("logical_and", np.logical_and, identity=1),
    _logical("logical_or", np.logical_or, identity=0),
    _logical("logical_xor", np.logical_xor, identity=0),
    _unary("abs", np.abs),
    _unary("square", np.square),
    _unary("relu", _relu),
    _unary("rsqrt", _rsqrt, _within(2.0**-87, 2.0**97, _rsqrt)),
    _unary("reciprocal", np.reciprocal, _within(2.0**-42, 2.0**42, np.reciprocal, of_magnitude=True)),
    _activation("copy", np.positive),
    _activation("exp", np.exp),
    _activation("log", _within(2.0**-64, 2.0**64, np.log)),
    _activation("sqrt", _within(2.0**-116, 2.0**118, np.sqrt)),
    _activation("sin", _within(-np.pi, np.pi, np.sin)),
    _activation("tanh", np.tanh),
    _activation("sigmoid", _sigmoid),
    _activation("silu", _silu),
    _activation("softplus", _softplus),
    _activation("sign", np.sign),
    Op("average", "average", reduction=_mean),
    Op("divide", "refused"),
    Op("mod", "refused"),
    Op("fmod", "refused"),
)
OPS: dict[str, Op] = {op.name: op for op in _TABLE}
