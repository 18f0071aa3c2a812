from fake_simulator import fake

__all__ = ["fake"]
