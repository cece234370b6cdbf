"""``python -m dmuon``: the same as the script ``dmuon``."""

from dmuon_fsdp.cli import main

main()
