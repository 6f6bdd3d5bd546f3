"""`stepfast k8s validate`: what a manifest decides about a training run, checked before it runs."""
