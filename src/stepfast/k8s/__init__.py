"""From one file to a job on Kubernetes: what the user writes, as the objects that a cluster takes.

Owns: the job file and the manifests made of it. Does not own: the processes inside of the pods;
their command lines are those of `cli`.
"""
