"""Existing models on tilewise, with one line that can be undone. Client libraries are imported only when they are asked for."""

from tilewise.integrations import diffusers, transformers
from tilewise.integrations.routing import Route, route, unroute

__all__ = ["Route", "diffusers", "route", "transformers", "unroute"]
