"""Symmetric products: the kernel contract, the built-in backends, discovery and the ladder."""
