"""Run existing models on tilewise with one line, which can be undone. Client libraries are imported on demand."""

from tilewise.integrations import diffusers, simpletuner, transformers
from tilewise.integrations.configuration import Configured, configure, mechanism_of
from tilewise.integrations.routing import Route, route, unroute

__all__ = ["Configured", "Route", "configure", "diffusers", "mechanism_of", "route", "simpletuner", "transformers", "unroute"]
