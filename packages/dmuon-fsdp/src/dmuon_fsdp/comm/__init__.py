"""Moves bytes between ranks: stateless functions that take everything they need."""
