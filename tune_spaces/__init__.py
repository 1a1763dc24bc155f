"""Spaces for `raytrain sweep`: each file's `space(draw)` says which recipes may be tried."""
