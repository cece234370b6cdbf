"""The ownership runtime: each dedicated matrix has one owner rank, the rest stays with FSDP2.

Its rooms: planning decides, comm moves, runtime remembers, optim orders, checkpoint maps names to owners and shards.
No room imports one above it. This version reserves the package; the runtime comes with the next one.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
