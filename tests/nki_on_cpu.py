"""Makes `import nki` work where AWS's package is absent, by the emulator; knows no kernel.

The `nki` that PyPI serves is a placeholder without `nki.isa`, and counts as absent.
"""

import importlib
import sys
from pathlib import Path

EMULATOR = Path(__file__).parent / "nki_emulator"


def ensure_nki() -> bool:
    """Puts the emulator first on `sys.path` unless there is a real `nki`.

    Returns:
        Whether `nki` is the emulator.
    """
    try:
        importlib.import_module("nki.isa")
    except ImportError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "nki"]:
            del sys.modules[name]
        sys.path.insert(0, str(EMULATOR))
        importlib.invalidate_caches()
        importlib.import_module("nki.isa")
    return Path(sys.modules["nki"].__file__).is_relative_to(EMULATOR)
