"""Triton kernels that ship compiled: torch and the NVIDIA driver run them, without Triton and without a C compiler.

``variant`` names them, ``manifest`` lists those that ship, ``layout`` packs their parameters, ``driver`` loads and
launches, ``shipped`` puts these together. ``tools/build_cubins.py`` of the repository makes them.
"""
