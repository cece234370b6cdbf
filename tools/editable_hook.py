"""Build hook of the root distribution: an editable install puts the clone's sources first on ``sys.path``.

pip installs the three packages as ordinary copies (metadata and entry points); the `.pth` makes the clone's code win.
"""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PTH = "dmuon_workspace_sources.pth"


class SourcesFirst(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "editable":
            return
        sources = sorted(str(path) for path in Path(self.root).glob("packages/*/src"))
        pth = Path(self.directory, PTH)
        # ascii(): how a .pth is decoded depends on the locale.
        pth.write_text(f"import sys; sys.path[:0] = {sources!a}\n", encoding="ascii")
        build_data["force_include_editable"][str(pth)] = PTH

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        Path(self.directory, PTH).unlink(missing_ok=True)
