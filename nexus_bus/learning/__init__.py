"""Learning: pure, runs without a server. `group` shares the forward, `algorithms` learn privately in a slot."""
