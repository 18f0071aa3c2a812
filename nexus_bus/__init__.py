"""Nexus Bus: post-train vision-language-action models for many tenants, as workers on NATS JetStream."""

__version__ = "0.1.0"
