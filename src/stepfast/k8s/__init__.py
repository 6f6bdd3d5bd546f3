"""Kubernetes: manifests from one file, and the lints that hold for ours and for anybody's."""
