"""What tests of DMuon and of third-party kernels share: adversarial spectra, the oracle, and the conformance suite."""

from dmuon_core.testing.orthogonality import (
    ERROR_RATIO,
    SIGMA_MARGIN,
    Verdict,
    exact_polynomial,
    judge,
    plain_newton_schulz,
    relative_error,
)
from dmuon_core.testing.spectra import SPECTRA, repeated_rows, with_singular_values
from dmuon_core.testing.syrk import (
    SyrkCase,
    SyrkErrorCase,
    run_syrk_case,
    run_syrk_error_case,
    syrk_cases,
    syrk_error_cases,
)

__all__ = [
    "ERROR_RATIO",
    "SIGMA_MARGIN",
    "SPECTRA",
    "SyrkCase",
    "SyrkErrorCase",
    "Verdict",
    "exact_polynomial",
    "judge",
    "plain_newton_schulz",
    "relative_error",
    "repeated_rows",
    "run_syrk_case",
    "run_syrk_error_case",
    "syrk_cases",
    "syrk_error_cases",
    "with_singular_values",
]
