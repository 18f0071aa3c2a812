"""Checks that need a GPU; without one they say so and end well."""
