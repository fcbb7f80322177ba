"""The refusal of what kernels for NeuronCores were not written for; knows no kernel."""


class UnsupportedByKernelError(ValueError):
    """A kernel cannot compute what was asked of it; the message says what it can."""


def require(holds: bool, sentence: str) -> None:
    """Raises UnsupportedByKernelError with the sentence unless it holds."""
    if not holds:
        raise UnsupportedByKernelError(sentence)


def is_power_of_two(size: int) -> bool:
    return size > 0 and not size & (size - 1)
