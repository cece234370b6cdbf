"""Who owns what, in which order: pure Python on names and shapes, no process group."""
