"""These kernels import `nki`."""

from nki_on_cpu import ensure_nki

ensure_nki()
