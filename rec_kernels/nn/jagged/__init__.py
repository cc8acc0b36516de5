"""Jagged containers of ids: features, their checks, and bags that samples share."""
