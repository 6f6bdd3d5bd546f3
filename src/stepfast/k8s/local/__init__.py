"""A manifest run on this machine: its pods as processes, `stepfast k8s local`."""
