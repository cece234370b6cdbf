"""Everything a user calls. This package defines nothing: the parts live in dmuon_core and dmuon_fsdp."""

from dmuon_core import (
    KELLER,
    POLAR_EXPRESS,
    YOU,
    MatrixView,
    NewtonSchulz,
    direct_newton_schulz,
    get_backend_status,
    get_ns_backend,
    gram_newton_schulz,
    newton_schulz,
)
from dmuon_fsdp import __version__

__all__ = [
    "KELLER",
    "POLAR_EXPRESS",
    "YOU",
    "MatrixView",
    "NewtonSchulz",
    "__version__",
    "direct_newton_schulz",
    "get_backend_status",
    "get_ns_backend",
    "gram_newton_schulz",
    "newton_schulz",
]
