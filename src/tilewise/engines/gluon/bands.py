"""Masks that are bands along the diagonal (lang/bands.py): kernels that find their tiles by arithmetic need neither a tile schedule nor mask bits."""

from tilewise.core.problem import Problem
from tilewise.engines.gluon.patches import grid_width
from tilewise.lang import Band, band_of
from tilewise.lang.bands import LONGEST
from tilewise.sizes import less


def band_for(p: Problem) -> Band | None:
    """The band that the whole mask is; None where a tile schedule is needed, or no mask is given."""
    if p.mask is None or p.given_tiles is not None or grid_width(p) is not None:
        return None
    return band_of(p.mask) if less(p.q_len, LONGEST) and less(p.kv_len, LONGEST) else None


def band_density(p: Problem, band: Band) -> float:
    """The share of the keys that a query sees, at most."""
    return min(1.0, max(0, band.high - band.low + 1) / p.kv_len)
