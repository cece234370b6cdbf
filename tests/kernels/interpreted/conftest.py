"""These tests run under TRITON_INTERPRET=1 only; ``test_interpreted.py`` starts them so."""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
