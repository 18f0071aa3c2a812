"""One file per role, all of one shape: docstring (what it does, reads, writes, what a kill leaves), resources, handle, ROLE."""
