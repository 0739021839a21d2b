"""Finds and keeps the settings that drives are best used with. Imports neither torch nor pydantic."""
