"""The one place that states the version; the build reads it without importing the package."""

__version__ = "0.1.0"
