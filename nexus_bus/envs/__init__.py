"""Simulators behind one session protocol. Nothing here knows the bus, and nothing heavy is imported until a session opens."""
