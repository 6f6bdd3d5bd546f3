"""From one file to a job on Kubernetes: manifests rendered, anybody's manifests checked.

Owns: the job file, the manifests made of it, the lints. Does not own: the processes inside of the
pods; their command lines are those of `cli`.
"""
