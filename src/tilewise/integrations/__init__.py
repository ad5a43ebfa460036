"""Existing models on tilewise, with one line that can be undone. Client libraries are imported only when they are asked for."""

from tilewise.integrations import diffusers, simpletuner, transformers
from tilewise.integrations.configuration import Configured, configure, mechanism_of
from tilewise.integrations.routing import Route, route, unroute

__all__ = ["Configured", "Route", "configure", "diffusers", "mechanism_of", "route", "simpletuner", "transformers", "unroute"]
