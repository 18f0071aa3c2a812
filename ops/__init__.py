"""What runs around the service: the demo, pretraining, schema generation, benches, examples."""
