"""The live page, the list of requests, and what happened to one of them."""

from minillm.server.dashboard.routes import Dashboard

__all__ = ["Dashboard"]
