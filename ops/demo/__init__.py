"""`make demo`: the whole line on one machine, four tenants on one backbone, from a job event to a better robot."""
