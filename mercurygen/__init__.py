"""mercurygen: distributed attention as modules that are searched for, proved and readable."""

__version__ = "0.1.0"
