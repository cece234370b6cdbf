"""Symmetric matrix products (SYRK) for PyTorch, on their own or as kernels of dmuon-core.

    from dmuon_kernels import syrk
    d = syrk(a)                        # a @ a.mT
    d = syrk(a, c=c, alpha=2.0, beta=-1.0)

Importing this loads no kernel, no kernel compiler and nothing on a GPU.
"""

from dmuon_kernels.ops import status, syrk

__version__ = "0.1.0"

__all__ = ["__version__", "status", "syrk"]
