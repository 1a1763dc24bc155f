"""Sweeps on Ray Tune: spaces, searches, trials in actors."""

from raytrain.orchestrate.sweep.space import Draw

__all__ = ["Draw"]
