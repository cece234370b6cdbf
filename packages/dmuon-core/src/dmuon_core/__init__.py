"""Muon for PyTorch: Newton-Schulz, the single-process optimizer, and the contract for symmetric-product kernels."""

import logging

from dmuon_core import testing
from dmuon_core.coefficients import KELLER, POLAR_EXPRESS, YOU, CoefficientSet, as_coefficients
from dmuon_core.newton_schulz import (
    NewtonSchulz,
    direct_newton_schulz,
    gram_newton_schulz,
    newton_schulz,
)
from dmuon_core.optimizer import Muon
from dmuon_core.report import get_backend_status, get_ns_backend
from dmuon_core.restarts import derive_restarts
from dmuon_core.syrk.contract import SyrkFn, SyrkSpec
from dmuon_core.syrk.tuning import tune
from dmuon_core.syrk.verdicts import export_verdicts, use_verdicts
from dmuon_core.update import lr_scale, muon_update_
from dmuon_core.views import MatrixView

__version__ = "0.1.0"

__all__ = [
    "KELLER",
    "POLAR_EXPRESS",
    "YOU",
    "CoefficientSet",
    "MatrixView",
    "Muon",
    "NewtonSchulz",
    "SyrkFn",
    "SyrkSpec",
    "as_coefficients",
    "derive_restarts",
    "direct_newton_schulz",
    "export_verdicts",
    "get_backend_status",
    "get_ns_backend",
    "gram_newton_schulz",
    "lr_scale",
    "muon_update_",
    "newton_schulz",
    "testing",
    "tune",
    "use_verdicts",
]

logging.getLogger("dmuon").addHandler(logging.NullHandler())
