"""Learning: pure functions of slots and work, run without a server. `group` shares the forward, `algorithms` learn privately."""
