"""The pure part: torch and attrs, never an engine or a trainer."""
