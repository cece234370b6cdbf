"""These tests run under TRITON_INTERPRET=1 only; ``test_interpreted.py`` starts them so."""

import os
import sys

import pytest

from dmuon_core import NewtonSchulz

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


@pytest.fixture
def fused(monkeypatch):
    """Newton-Schulz takes its workspace, and an update its fused passes, on a CPU too."""
    from dmuon_kernels.update import TRITON_UPDATE

    monkeypatch.setattr(NewtonSchulz, "_has_workspace", lambda self, device: True)
    monkeypatch.setattr(sys.modules[NewtonSchulz.__module__], "_multiprocessors", lambda device: 4)
    monkeypatch.setattr(NewtonSchulz, "update_fns", lambda self, device: TRITON_UPDATE)
